"""A document's text -> passages of limited length, cut where its sentences, paragraphs or headings end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ragspec.errors import ConfigError, flat
from ragspec.models.resolve import brings_code, needs_code, resolve
from ragspec.retrieval.readers import Text

WORDS = "words"


def passage_ids(document: str, count: int) -> Sequence[str]:
    """Return the ids of a document's passages: its own id if there is one passage, else `id#1`, `id#2`, ...

    A document whose own id has that form is always numbered, so no two documents have a passage id in common.
    """
    if count == 1 and not looks_numbered(document):
        return [document]
    return [f"{document}#{number}" for number in range(1, count + 1)]


def looks_numbered(document: str) -> bool:
    """Return whether a document's id could be that of another document's passage."""
    return re.search(r"#[1-9][0-9]*\Z", document) is not None


class Chunker:
    """Cuts documents into passages of at most `size` tokens, the title counted, neighbours sharing up to `overlap`.

    tokens: a `tokenizers.Tokenizer`. A passage never ends inside a word unless a word alone is too long.
    Source of the rule: the semantic-text-splitter library.
    """

    def __init__(self, tokens: Any, size: int, overlap: int) -> None:
        self._tokens = tokens
        self._size = size
        self._overlap = overlap
        self._splitter = lru_cache(maxsize=64)(self._make_splitter)

    def split(self, text: Text) -> list[str]:
        """Return the passages of a document in order; none if it has no text."""
        title = len(self._tokens.encode(text.title, add_special_tokens=False).ids) + 1 if text.title else 0
        capacity = max(self._size // 2, self._size - title, 1)  # a long title must not eat the passage
        chunks: list[str] = self._splitter(capacity, text.markdown).chunks(text.text)
        return [chunk for chunk in chunks if chunk.strip()]

    def _make_splitter(self, capacity: int, markdown: bool) -> Any:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter

        kind = MarkdownSplitter if markdown else TextSplitter
        return kind.from_huggingface_tokenizer(self._tokens, capacity, min(self._overlap, capacity // 2))


def word_tokens() -> Any:
    """Return a tokenizer without a model: words, punctuation marks and Chinese characters are one token each."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokens = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))  # noqa: S106 (no password)
    tokens.normalizer = normalizers.BertNormalizer(clean_text=False, strip_accents=False, lowercase=False)
    tokens.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokens


def model_tokens(name: str) -> Any:
    """Return the tokenizer of a model (hub id, folder, demo). Raises ConfigError."""
    from transformers import AutoTokenizer

    source = resolve(name, key="retrieval.tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=False)  # None: asks on stdin
        return plain(tokenizer.backend_tokenizer)
    except (OSError, ValueError, AttributeError) as error:
        if brings_code(source):
            raise ConfigError(f'retrieval.tokenizer: "{name}": {needs_code(None)}') from None
        raise ConfigError(
            f'retrieval.tokenizer: "{name}": has no fast tokenizer that loads ({flat(error, 160)})'
        ) from None


def plain(tokens: Any) -> Any:
    """Return a copy of a tokenizer that neither cuts nor pads."""
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokens.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy
