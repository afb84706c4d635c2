"""What a model's code calls the arguments of a forward: that differs between versions of transformers."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any


def cache_word(code: Callable[..., Any]) -> str:
    """Return what a function of a model calls the cache that it is handed: `cache` since transformers 5.24."""
    return "cache" if "cache" in signature(code).parameters else "past_key_values"
