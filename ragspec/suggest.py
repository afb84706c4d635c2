"""The end of an error message: what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean "x"?' where one of `known` is close, else '; known: a, b, c'."""
    choices = list(known)
    near = get_close_matches(word, choices, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(choices)}"
