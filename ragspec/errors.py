"""What can go wrong, and the exit code that says so.

    RagspecError
    ├── ConfigError    the config, the usage or the input as a whole: exit code 2, before any weights load
    ├── ModelError     the model or its backend could not start: exit code 3
    └── RecordError    one record: an error line in the output, and the batch goes on

Every message is one line: what is wrong, where, what is allowed, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], listed: Iterable[str] | None = None) -> str:
    """Return '; did you mean "x"?' where one of `known` is close, else '; known: a, b, c': the end of a message.

    listed: what to list instead of all that is known.
    """
    from difflib import get_close_matches

    choices = list(known)
    near = get_close_matches(word, choices, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(choices if listed is None else listed)}"


def flat(error: Exception, most: int | None = None) -> str:
    """Return an error's text on one line, its first `most` characters."""
    return " ".join(str(error).split())[:most]


class RagspecError(Exception):
    """The root of everything that ragspec raises on purpose."""

    exit_code = 2


class ConfigError(RagspecError):
    """The run does not start: bad config, usage or input."""

    exit_code = 2


class ModelError(RagspecError):
    """The model or its backend could not start, or broke for good in the middle."""

    exit_code = 3


class RecordError(RagspecError):
    """One record cannot be answered; the others can."""

    exit_code = 1
