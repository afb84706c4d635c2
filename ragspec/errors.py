"""The exception hierarchy and its exit codes, and helpers for messages.

    RagspecError
    ├── ConfigError    the config, the usage or the input as a whole: exit code 2, before any weights load
    ├── ModelError     the model or its backend cannot start: exit code 3
    └── RecordError    one record: an error line in the output; the batch continues

Every message is one line: what is wrong, where, what is allowed, what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

WHERE = re.compile(r"^.{1,300}?(?::| row )\d+: ")  # the file and line or row that a message begins with
# the parts of a message that differ between records with the same cause
VARYING = re.compile(
    r"(?:\w+://|~/|\.{1,2}/|(?<![\w)])/)[^\s\"')\]]+"  # addresses and paths
    r"|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    r"|\b0x[0-9a-fA-F]+|\b(?=[a-fA-F]*\d)[0-9a-fA-F]{8,}\b"
    r"|\d[\d,.]*\d|\d"
)


def did_you_mean(word: str, known: Iterable[str], listed: Iterable[str] | None = None) -> str:
    """Return the end of a message: '; did you mean "x"?' if one of `known` is close, else '; known: a, b, c'.

    listed: what to list instead of `known`.
    """
    from difflib import get_close_matches

    choices = list(known)
    near = get_close_matches(word, choices, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(choices if listed is None else listed)}"


def flat(error: Exception, most: int | None = None) -> str:
    """Return an error's text on one line, cut to `most` characters."""
    return " ".join(str(error).split())[:most]


def cause_of(message: str, name: str = "") -> str:
    """Return a message without its location, `name`, numbers, paths and hashes, to group records by cause."""
    message = WHERE.sub("", message)
    return VARYING.sub("\u2026", message.replace(name, "\u2026") if name else message)


class RagspecError(Exception):
    """Base class of the errors that ragspec raises on purpose. Their messages are one line, for users.

    Attributes:
        exit_code: Exit code of a command that ends with this error.
    """

    exit_code = 2


class ConfigError(RagspecError):
    """The config, the usage or the input as a whole is wrong. Exit code 2; raised before any weights load."""

    exit_code = 2


class ModelError(RagspecError):
    """The model or its backend could not start, or stopped working during the run. Exit code 3."""

    exit_code = 3


class RecordError(RagspecError):
    """One record cannot be answered; the others can."""

    exit_code = 1
