"""A transformers tokenizer in the shape that the pipeline wants."""

from __future__ import annotations

from typing import Any

from ragspec.errors import ConfigError, flat
from ragspec.models import TRUST_KEY, ModelSource, brings_code, needs_code


class HFTokenizer:
    """Encodes prompts and decodes answers. encode_args go to every tokenizer call, over what ragspec passes."""

    def __init__(self, inner: Any, encode_args: dict[str, Any] | None = None) -> None:
        self.inner = inner
        self.has_chat_template = bool(inner.chat_template)
        self._encode_args = {"verbose": False, **(encode_args or {})}

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Return the token ids of `text`, with the tokenizer's own special tokens around it if asked for."""
        ids = self.inner(text, **{"add_special_tokens": special_tokens, **self._encode_args})["input_ids"]
        return list(ids)

    def offsets(self, text: str, *, special_tokens: bool) -> list[tuple[int, int]] | None:
        """Return where in `text` each token of encode() stands, or None where the tokenizer does not know."""
        if not self.inner.is_fast:
            return None
        args = {"add_special_tokens": special_tokens, **self._encode_args, "return_offsets_mapping": True}
        return [(start, end) for start, end in self.inner(text, **args)["offset_mapping"]]

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids`, special tokens left out."""
        text: str = self.inner.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """Return the chat as the model's template writes it, ending where the answer begins."""
        text: str = self.inner.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
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
