"""The finished input rows of an output: rows with an answer or an error line, identified by fingerprints.

>>> ledger = Ledger(); ledger.note(Finished("a1b2", "q1")); "a1b2" in ledger
True
"""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections.abc import Callable
from typing import Any, NamedTuple

from ragspec.errors import cause_of
from ragspec.inputs.base import InputRow
from ragspec.inputs.record_ids import KeySet
from ragspec.json_text import loads
from ragspec.stats import Causes

LINE = "batch_req_"  # precedes the fingerprint in the id of an OpenAI Batch API line


def fingerprint(row: InputRow, record_id: str | None) -> str:
    """Return a hash of an input row: of its content, with its id or, without one, its number."""
    name = f"line {row.number}" if record_id is None else f"id {record_id}"
    return hashlib.blake2b(name.encode() + b"\0" + row.raw, digest_size=12).hexdigest()


class Finished(NamedTuple):
    """What an output line finishes. key: the fingerprint, None for a foreign line. message: why the record failed.

    request: the digest of the prompt and sampling that it answers, "" if unknown. config: the digest of the config that
    answered it, "" for the one that began the output.
    """

    key: str | None = None
    id: str = ""
    failed: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    message: str = ""
    request: str = ""
    config: str = ""

    @classmethod
    def of(cls, raw: bytes) -> Finished:
        """Return what the line `raw` finishes."""
        try:
            line = loads(raw.removeprefix(BOM_UTF8))
            batch = "fingerprint" not in line
            key = line["id"].removeprefix(LINE) if batch else line["fingerprint"]
            name = line["custom_id"] if batch else line["id"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls()
        if not isinstance(key, str) or not isinstance(name, str) or (batch and key == line["id"]):
            return cls()
        by = (_text(line.get("request")), _text(line.get("config")))
        error = line.get("error")
        if error is not None:
            return cls(key, name, True, 0, 0, str(error.get("message", "")) if isinstance(error, dict) else "", *by)
        return cls(key, name, False, *_tokens(line, batch), "", *by)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _tokens(line: dict[str, Any], batch: bool) -> tuple[int, int]:
    """Return an answer's prompt and output tokens, 0 if its line lacks them."""
    try:
        counts = line["response"]["body"]["usage"] if batch else line
        found = counts["prompt_tokens"], counts["completion_tokens" if batch else "output_tokens"]
    except (KeyError, TypeError):
        return 0, 0
    return found if all(isinstance(count, int) for count in found) else (0, 0)


Drop = Callable[[Finished], bool]  # returns whether to remove a line because its record is retried


class Ledger:
    """The finished rows of earlier runs. resumed: their number of lines. failures: the causes of failed ones.

    answers, prompt_tokens, output_tokens: counted over answered lines. foreign: number of lines that finish nothing.
    repeated: number of lines for rows that an earlier line had finished.
    """

    def __init__(self) -> None:
        self.resumed = 0
        self.answers = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.foreign = 0
        self.repeated = 0
        self.failures = Causes()
        self._finished = KeySet()
        self._answered_ids = KeySet()
        self._failed = KeySet()

    def __contains__(self, key: str) -> bool:
        return key in self._finished

    def note(self, found: Finished) -> None:
        """Add a line. A foreign line finishes nothing."""
        if found.key is None:
            self.foreign += 1
            return
        self.repeated += not self._finished.add(found.key)
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
        """Return whether any row with this id has an answer, regardless of its content."""
        return record_id in self._answered_ids
