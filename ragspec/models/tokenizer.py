"""A transformers tokenizer in the shape that the pipeline wants."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ragspec.errors import ConfigError, flat
from ragspec.models.controls import Controls
from ragspec.models.reasoning import thinking_of
from ragspec.models.renamed import Renamed
from ragspec.models.resolve import TRUST_KEY, ModelSource, brings_code, needs_code
from ragspec.records import Spans


class HFTokenizer:
    """Encodes prompts and decodes answers. encode_args go to every tokenizer call, over what ragspec passes.

    width: tokens that the model embeds; None: as many as the tokenizer has.
    """

    def __init__(self, inner: Any, encode_args: dict[str, Any] | None = None, width: int | None = None) -> None:
        self.inner = inner
        self._width = width
        self.has_chat_template = bool(inner.chat_template)
        self.controls = Controls(inner)
        self.thinking = thinking_of(inner)
        self._encode_args = {"verbose": False, **(encode_args or {})}

    def encode(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[int]:
        """Return the token ids of `text`, with the tokenizer's own special tokens around it if asked for.

        own: the places in `text` of control words that become control tokens, all others being text. None: all do.
        """
        ids = list(self._call(text, own, special_tokens)["input_ids"])
        ids = ids if own is None else self._twin.ids(ids)
        return ids[self._beyond_one(ids, special_tokens) :]

    def _beyond_one(self, ids: list[int], special_tokens: bool) -> int:
        """Return how many begin-of-sequence tokens precede the last of those at the begin of `ids`.

        The tokenizer puts one before a text that may have its own, written by a template or by a user.
        """
        if not special_tokens or self.bos is None or ids[:2] != [self.bos, self.bos]:
            return 0
        return next((at for at, token in enumerate(ids) if token != self.bos), len(ids)) - 1

    @cached_property
    def bos(self) -> int | None:
        """The begin-of-sequence token, if the tokenizer puts it before texts."""
        token = self.inner.bos_token_id
        ids = self.inner("a", verbose=False)["input_ids"]
        return token if token is not None and ids[:1] == [token] else None

    def control_ids(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[int]:
        """Return the control tokens that encode() makes of the whole of `text`, in order."""
        ids = self._call(text, own, special_tokens, truncation=False)["input_ids"]
        return self.controls.among(ids if own is None else self._twin.ids(ids))

    def control_spans(self, text: str, *, special_tokens: bool) -> Spans | None:
        """Return where in `text` the control tokens of encode() are, or None if they cannot be told apart."""
        if not self.inner.is_fast:
            return None
        read = self._call(text, None, special_tokens, truncation=False, return_offsets_mapping=True)
        spans = []
        for token, (start, end) in zip(read["input_ids"], read["offset_mapping"], strict=True):
            span = self.controls.span(text, start, end)  # spaces beside a word may belong to its token
            if span is not None and self.controls.ids[text[slice(*span)]] == token:
                spans.append(span)
            elif start < end and self.controls.among([token]):
                return None  # the tokenizer normalises, and reads another word as this one
        return spans

    def offsets(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[tuple[int, int]] | None:
        """Return where in `text` each token of encode() is, or None if the tokenizer does not know."""
        if not self.inner.is_fast:
            return None
        found = self._call(text, own, special_tokens, return_offsets_mapping=True)
        offsets = [(start, end) for start, end in found["offset_mapping"]]
        offsets = offsets if own is None else self._twin.places(offsets, text, own)
        ids = list(found["input_ids"])
        return offsets[self._beyond_one(ids if own is None else self._twin.ids(ids), special_tokens) :]

    @cached_property
    def _twin(self) -> Renamed:
        return Renamed(self.inner, self.controls.ids)

    def _call(self, text: str, own: Spans | None, special_tokens: bool, **more: Any) -> Any:
        args = {"add_special_tokens": special_tokens, **self._encode_args, **more}
        if own is None:
            return self.inner(text, **args)
        return self._twin.inner(self._twin.rename(text, own), **args)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids`, special tokens left out."""
        text: str = self.inner.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    @property
    def width(self) -> int:
        """How many tokens the model embeds."""
        return self.size if self._width is None else self._width

    @property
    def size(self) -> int:
        """How many tokens it has."""
        return len(self.inner)

    def piece(self, token_id: int) -> str:
        """Return the text of one token, a control token's name included."""
        text: str = self.inner.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def render_chat(self, messages: list[dict[str, Any]], **args: Any) -> str:
        """Return the chat as the model's template writes it, ending where the answer begins.

        args: of apply_chat_template, and what else the template may look at.
        """
        if not args.get("continue_final_message"):
            args.setdefault("add_generation_prompt", True)
        text: str = self.inner.apply_chat_template(messages, tokenize=False, **args)
        return text


def load_tokenizer(
    source: ModelSource,
    *,
    key: str = "model",
    trust_remote_code: bool = False,
    trust_key: str = TRUST_KEY,
    extra: dict[str, Any] | None = None,
) -> Any:
    """Return the transformers tokenizer of a model. Raises ConfigError beginning with `key`.

    trust_key: what would let the tokenizer's own code run, for the message. extra: further from_pretrained arguments.
    """
    from transformers import AutoTokenizer

    args = {"revision": source.revision or "main", "trust_remote_code": trust_remote_code, **(extra or {})}
    try:
        return AutoTokenizer.from_pretrained(source.path, **args)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        if not args["trust_remote_code"] and brings_code(source):
            raise ConfigError(f'{key}: "{source.name}": its tokenizer {needs_code(trust_key)}') from error
        text = flat(error, 200)
        raise ConfigError(f'{key}: "{source.name}": its tokenizer cannot be loaded ({text})') from error
