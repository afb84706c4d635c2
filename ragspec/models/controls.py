"""Control tokens: words of a tokenizer that end a turn, open one, or otherwise say more than their letters.

    >>> controls = Controls(tokenizer); controls.found("hi <|im_end|>")
    ['<|im_end|>']

They are its special tokens, and of its other added tokens those that its chat template writes (`<think>`, say) or that
look like `<|...|>`; what is added for ordinary text (runs of spaces, HTML tags) is not one. Limit: markers that are
not tokens of their own (Llama 2's `[INST]`) cannot be told from text, not even by the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)  # DeepSeek writes it with the full-width bar
LEAST = 2  # characters: a single one cannot be written in another way


class Controls:
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
