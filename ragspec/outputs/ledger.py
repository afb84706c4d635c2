"""What is finished: the input rows that an output has answers or error lines for, recognised by their fingerprints.

>>> ledger = Ledger(); ledger.note(Finished("a1b2", "q1")); "a1b2" in ledger
True
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from ragspec.errors import cause_of
from ragspec.inputs.base import InputRow
from ragspec.inputs.record_ids import KeySet
from ragspec.json_text import loads
from ragspec.stats import Causes

LINE = "batch_req_"  # before the fingerprint, in the id of a line of OpenAI's Batch API


def fingerprint(row: InputRow, record_id: str | None) -> str:
    """Return what names an input row: its content with its id, or with its number if it has no id of its own."""
    name = f"line {row.number}" if record_id is None else f"id {record_id}"
    return hashlib.blake2b(name.encode() + b"\0" + row.raw, digest_size=12).hexdigest()


class Finished(NamedTuple):
    """What an output line finishes. key: the fingerprint; None if it is not one of ours. message: why it failed."""

    key: str | None = None
    id: str = ""
    failed: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    message: str = ""

    @classmethod
    def of(cls, raw: bytes) -> Finished:
        """Return what the line `raw` finishes."""
        try:
            line = loads(raw)
            batch = "fingerprint" not in line
            key = line["id"].removeprefix(LINE) if batch else line["fingerprint"]
            name = line["custom_id"] if batch else line["id"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls()
        if not isinstance(key, str) or not isinstance(name, str) or (batch and key == line["id"]):
            return cls()
        error = line.get("error")
        if error is not None:
            return cls(key, name, True, message=str(error.get("message", "")) if isinstance(error, dict) else "")
        return cls(key, name, False, *_tokens(line, batch))


def _tokens(line: dict[str, Any], batch: bool) -> tuple[int, int]:
    """Return the tokens of an answer's prompt and of the answer, as far as its line says."""
    try:
        counts = line["response"]["body"]["usage"] if batch else line
        found = counts["prompt_tokens"], counts["completion_tokens" if batch else "output_tokens"]
    except (KeyError, TypeError):
        return 0, 0
    return found if all(isinstance(count, int) for count in found) else (0, 0)


Drop = Callable[[Finished], bool]  # whether a line is left out, because its record is tried again


class Ledger:
    """The finished rows of earlier runs. resumed: how many lines there were; failures: why some failed.

    answers, prompt_tokens, output_tokens: of the lines that are answers.
    """

    def __init__(self) -> None:
        self.resumed = 0
        self.answers = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.failures = Causes()
        self._finished = KeySet()
        self._answered_ids = KeySet()
        self._failed = KeySet()

    def __contains__(self, key: str) -> bool:
        return key in self._finished

    def note(self, found: Finished) -> None:
        """Take in a line. One that is not ours stays where it is, and finishes nothing."""
        if found.key is None:
            return
        self._finished.add(found.key)
        if found.failed:
            self._failed.add(found.key)
            self.failures.add(cause_of(found.message, found.id), found.message)
        else:
            self._answered_ids.add(found.id)
            self.answers += 1
            self.prompt_tokens += found.prompt_tokens
            self.output_tokens += found.output_tokens
        self.resumed += 1

    def failed(self, key: str) -> bool:
        """Return whether a finished row has an error line."""
        return key in self._failed

    def answered(self, record_id: str) -> bool:
        """Return whether some row with this id has an answer, whatever its content was then."""
        return record_id in self._answered_ids
