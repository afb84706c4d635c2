"""Control tokens: words of a tokenizer that end a turn, open one, or otherwise say more than their letters.

    >>> controls = ControlTokens(tokenizer); controls.found("hi <|im_end|>")
    ['<|im_end|>']

They are its special tokens, and of its other added tokens those that its chat template writes (`<think>`, say) or that
look like `<|...|>`; what is added for ordinary text (runs of spaces, HTML tags) is not one. Limit: markers that are
not tokens of their own (Llama 2's `[INST]`) cannot be told from text, not even by the model.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import orjson

from ragspec.errors import ConfigError, flat
from ragspec.models.resolve import TRUST_KEY, ModelSource, brings_code, needs_code
from ragspec.models.stopping import thinking_of
from ragspec.records import Spans

MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)  # DeepSeek writes it with the full-width bar
LEAST = 2  # characters: a single one cannot be written in another way


class ControlTokens:
    """The control words of a transformers tokenizer, and where they are in a text."""

    def __init__(self, inner: Any) -> None:
        self.ids = control_ids(inner)
        # any character may become the unknown token
        self._numbers = frozenset(self.ids.values()) - {getattr(inner, "unk_token_id", None)}
        self._normalizer = inner.backend_tokenizer.normalizer if self.ids and inner.is_fast else None
        self._word = re.compile(pattern(self.ids)) if self.ids else None
        self._normal_word = None
        self.words = frozenset(self.ids)
        if self._normalizer is not None:
            self.words |= {normal for word in self.ids if (normal := self.normal(word).strip("▁ "))}
            self._normal_word = re.compile(pattern(self.words))

    def among(self, token_ids: Iterable[int]) -> list[int]:
        """Return those of `token_ids` that are control tokens, except the unknown token."""
        return [token for token in token_ids if token in self._numbers]

    def normal(self, text: str) -> str:
        """Return what the tokenizer makes of `text` before it looks for tokens."""
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))

    def found(self, text: str) -> list[str]:
        """Return the control words in `text`, in order; then those in its normal form, if the tokenizer has one."""
        if self._word is None:
            return []
        words = self._word.findall(text)
        return words if self._normal_word is None else [*words, *self._normal_word.findall(self.normal(text))]

    def span(self, text: str, start: int, end: int) -> tuple[int, int] | None:
        """Return where the first control word between these places of `text` is, None if there is none."""
        found = self._word.search(text, start, end) if self._word else None
        return found.span() if found else None

    def apart(self, text: str) -> str:
        """Return `text` with a space inside each control word, so that it no longer is one."""
        return text if self._word is None else self._word.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)


def control_ids(inner: Any) -> dict[str, int]:
    """Return the control words of a transformers tokenizer with their ids, if it finds them in texts."""
    template = inner.chat_template or ""
    written = "".join(template.values()) if isinstance(template, dict) else str(template)
    added = getattr(inner, "added_tokens_decoder", None)
    if not isinstance(added, dict):
        return {}  # mistral-common's, which finds no control tokens in texts
    found = {word: inner.convert_tokens_to_ids(word) for word in inner.all_special_tokens}
    for index, token in added.items():
        word = str(token)
        # a template's source has newlines and words of Jinja too: only what looks like a tag counts
        tag = any(map(str.isalnum, word)) and not (word[0].isalnum() or word[-1].isalnum())
        if token.special or MARKER.fullmatch(word) or (tag and word in written):
            found[word] = index
    return {word: index for word, index in found.items() if len(word) >= LEAST and isinstance(index, int)}


def pattern(words: Iterable[str]) -> str:
    """Return a regular expression that takes the longest of `words`, in time that does not grow with their number."""
    tails: dict[str, list[str]] = {}
    ends = False
    for word in words:
        if word:
            tails.setdefault(word[0], []).append(word[1:])
        ends = ends or not word
    branches = [re.escape(head) + pattern(rest) for head, rest in tails.items()]
    if not branches:
        return ""
    joined = f"(?:{'|'.join(branches)})"
    return f"{joined}?" if ends else joined


# -- a transformers tokenizer in the shape that the pipeline wants ----------------------------------------------------


class HFTokenizer:
    """Encodes prompts and decodes answers. encode_args go to every tokenizer call, over what ragspec passes.

    width: tokens that the model embeds; None: as many as the tokenizer has.
    """

    def __init__(self, inner: Any, encode_args: dict[str, Any] | None = None, width: int | None = None) -> None:
        self.inner = inner
        self._width = width
        self.has_chat_template = bool(inner.chat_template)
        self.controls = ControlTokens(inner)
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
    def _twin(self) -> MaskedTokenizer:
        return MaskedTokenizer(self.inner, self.controls.ids)

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


# -- a tokenizer whose control tokens answer to other names, so that text with their old names is text like an --------
#
# Everything else is as it was: normalisation, splitting, merges, spaces at the edges, what is put around a prompt. So
# text is cut exactly as it would be if the control words in it were ordinary words. Source: tokenizers 0.23, the
# tokenizer.json format. Its own `encode_special_tokens` splits special tokens wherever they are, leaves other added
# ones whole, and a Unigram vocabulary still finds `</s>` as a piece.


class MaskedTokenizer:
    """The renamed twin of a fast transformers tokenizer. controls: its control words and their ids."""

    def __init__(self, inner: Any, controls: Mapping[str, int]) -> None:
        from tokenizers import Tokenizer

        nonce = secrets.token_hex(8)  # nobody can guess these names; their edges matter to the text beside them
        self._names = {word: f"{word[0]}{nonce}{place:06x}{word[-1]}" for place, word in enumerate(controls)}
        described = orjson.loads(inner.backend_tokenizer.to_str())
        backend = Tokenizer.from_str(orjson.dumps(_renamed(described, self._names)).decode())
        self.inner = copy.copy(inner)
        self.inner._tokenizer = backend
        ids = {backend.token_to_id(name): controls[word] for word, name in self._names.items()}
        self._back = {new: old for new, old in ids.items() if new != old}

    def rename(self, text: str, own: Spans) -> str:
        """Return `text` with the control words at `own` under their new names."""
        parts, at = [], 0
        for start, end in own:
            parts += [text[at:start], self._names[text[start:end]]]
            at = end
        return "".join([*parts, text[at:]])

    def ids(self, token_ids: Sequence[int]) -> list[int]:
        """Return token ids of this tokenizer as the original's."""
        return [self._back.get(token, token) for token in token_ids] if self._back else list(token_ids)

    def places(self, offsets: Sequence[tuple[int, int]], text: str, own: Spans) -> list[tuple[int, int]]:
        """Return `offsets` into rename(text, own) as offsets into `text`."""
        place: list[int] = []  # of every character of the renamed text in `text`, and of what follows the last
        at = 0
        for start, end in own:
            place += [*range(at, start), *[start] * len(self._names[text[start:end]])]
            at = end
        place += range(at, len(text) + 1)
        return [(place[start], place[end]) for start, end in offsets]


def _renamed(described: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer.json with other names for some added tokens, in the list of them and in the vocabulary."""
    for token in described["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = described["model"]
    merges = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges") or ())
    merged = {one + two for one, two in merges}  # what a merge makes has to keep its name
    names = {word: name for word, name in names.items() if word not in merged}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(word, word): index for word, index in vocabulary.items()}
    else:  # Unigram: [piece, score], the place is the id
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return described
