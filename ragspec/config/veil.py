"""Messages without secrets: `Veil(config)("401 for hf_abc...")`. Libraries may repeat their arguments.

Errors, notes and logs go through here. What the config's Secrets hide is removed, even if a library has shortened it,
and so is whatever looks like a secret. Limit: a secret of fewer than four characters stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ragspec.config.secret import secrets_in
from ragspec.config.secret_words import parts_of_message
from ragspec.errors import ModelError, RagspecError, flat

INSTEAD = "[secret]"
LEAST = 4  # characters
PIECE = 8  # characters of a secret that are still worth hiding


class Veil:
    """Hides the secrets of nested `value`, a dumped config for instance, in texts."""

    def __init__(self, value: Any = None) -> None:
        hidden = {part for _, secret in secrets_in(value) for part in secret.parts() if len(part) >= LEAST}
        self._whole = sorted(hidden, key=len, reverse=True)
        self._pieces = {part[i : i + PIECE] for part in hidden for i in range(len(part) - PIECE + 1)}

    def __call__(self, text: str) -> str:
        """Return `text` with each secret in it replaced."""
        for part in self._whole:
            text = _hidden(part).sub(INSTEAD, text)
        for part in sorted(parts_of_message(text), key=len, reverse=True):
            text = text.replace(part, INSTEAD)
        return self._without_pieces(text) if self._pieces else text

    def _without_pieces(self, text: str) -> str:
        """Libraries print the first and the last characters of long values."""
        covered = [False] * len(text)
        for start in range(len(text) - PIECE + 1):
            if text[start : start + PIECE] in self._pieces:
                covered[start : start + PIECE] = [True] * PIECE
        if not any(covered):
            return text
        marked = "".join("\0" if hide else letter for letter, hide in zip(text, covered, strict=True))
        return re.sub("\0+", INSTEAD, marked)

    @contextmanager
    def over_errors(self) -> Iterator[None]:
        """Raise what is raised inside with its message veiled; its causes are dropped if they contain a secret."""
        try:
            yield
        except Exception as error:  # only its text is examined, and it is raised again
            if all(self(text) == text for text in _said(error)):
                raise
            if isinstance(error, RagspecError):
                raise type(error)(self(str(error))) from None
            raise ModelError(f"{type(error).__name__}: {self(flat(error))}") from None


def _said(error: BaseException | None) -> Iterator[str]:
    """Yield the messages of an error and of what led to it: a traceback shows them all."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


def _hidden(part: str) -> re.Pattern[str]:
    """Return where a secret is in a text: a short one that is a word ("test") is no part of another ("latest")."""
    edge = r"\b" if len(part) < PIECE and part.isalnum() else ""
    return re.compile(f"{edge}{re.escape(part)}{edge}")
