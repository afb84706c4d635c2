"""What can go wrong, and the exit code that says so.

    RagspecError
    ├── ConfigError    the config, the usage or the input as a whole: exit code 2, before any weights load
    ├── ModelError     the model or its backend could not start: exit code 3
    └── RecordError    one record: an error line in the output, and the batch goes on

Every message is one line: what is wrong, where, what is allowed, what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

WHERE = re.compile(r"^.{1,300}?(?::| row )\d+: ")  # the file and the line or row, before what is wrong there
# what differs from record to record in messages of one cause
VARYING = re.compile(
    r"(?:\w+://|~/|\.{1,2}/|(?<![\w)])/)[^\s\"')\]]+"  # addresses and paths
    r"|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    r"|\b0x[0-9a-fA-F]+|\b(?=[a-fA-F]*\d)[0-9a-fA-F]{8,}\b"
    r"|\d[\d,.]*\d|\d"
)


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


def cause_of(message: str, name: str = "") -> str:
    """Return a message without what differs from record to record: where it is, its `name`, numbers, paths, hashes."""
    said = WHERE.sub("", message)
    return VARYING.sub("\u2026", said.replace(name, "\u2026") if name else said)


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
