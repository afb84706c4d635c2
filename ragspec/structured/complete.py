"""Whether a text is a whole answer by its grammar, whatever model wrote it.

    >>> is_complete('start: "no" | "nothing"', "no"), is_complete('start: "no" | "nothing"', "not")
    (True, False)

The text is read byte by byte, so that no tokenizer is needed. Limit: a grammar that names special tokens has no such
text.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

KEPT = 256  # compiled grammars


def is_complete(grammar: str, text: str) -> bool:
    """Return whether the grammar admits `text` with nothing after it."""
    matcher = compiled(grammar).deep_copy()
    tokens = list(text.encode(errors="replace"))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def spaced(value: Any) -> str:
    """Return JSON's `value` spaced as grammars space it (form.py)."""
    return json.dumps(value, ensure_ascii=False)


@lru_cache(maxsize=KEPT)
def compiled(grammar: str) -> Any:
    """Return a grammar's state before an answer; its tokens are bytes. Copy it, as it is kept."""
    from llguidance import LLMatcher

    return LLMatcher(_bytes(), LLMatcher.grammar_from_lark(grammar), log_level=0)


@lru_cache(maxsize=1)
def _bytes() -> Any:
    """Return llguidance's tokenizer of bytes."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
