"""The statistics file of a run: written when it begins and while it goes on, and complete at its end.

    {"state": "running", "updated_at": "2026-01-31T04:00:10+00:00", "records": 120, ...}

`state` is `running`, `finished` or `stopped`; a run that was killed leaves `running`, and a time that has passed. The
file is replaced as a whole, so a reader never sees a part of it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from ragspec.errors import ConfigError
from ragspec.outputs.base import Document
from ragspec.outputs.folder import LocalDocument
from ragspec.outputs.run_state import check_writable
from ragspec.outputs.target import Target
from ragspec.stats import RunSummary

EVERY_S = 10.0  # between two versions of the file
SHARE = 0.01  # of the run's time that may go into writing it
RUNNING, FINISHED, STOPPED = "running", "finished", "stopped"


class StatisticsFile:
    """The statistics of one run, at `path` or beside the output. As a context manager, it writes them at the end.

    Attributes:
        summary: The run's totals; nothing is written without.

    Raises:
        ConfigError: `path` cannot be written, or is a file of something else.
    """

    def __init__(self, path: str | None, target: Target | None) -> None:
        self.summary: RunSummary | None = None
        self._own = path is not None
        self._document: Document | None = target.statistics if target is not None else None
        if path is not None:
            self._document = _own_document(Path(path))
        self._total: int | None = None
        self._before: dict[str, Any] | None = None  # the figures of an earlier run
        self._next = time.monotonic() + EVERY_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.summary is None or self._document is None:
            return
        state = FINISHED if kind is None and not self.summary.stopped else STOPPED
        try:
            self._write_last(self._document, self.summary, state)
        except OSError as error:
            self.summary.notes.append(f"{self._document.name}: the statistics cannot be written ({error.strerror})")

    def begin(self, total: int | None) -> None:
        """Write that the run has begun. total: rows of the input, None if unknown."""
        self._total = total
        if self._document is None or self.summary is None:
            return
        with suppress(OSError):  # the last write tells the user
            self._before = self._document.read()
            self._document.write(_dated({**self.summary.to_json(), "input_records": total}, RUNNING))

    def report(self, summary: RunSummary, total: int | None) -> None:
        """Write the totals so far, if it is time to."""
        self._total = total
        if self._document is None or time.monotonic() < self._next:
            return
        began = time.monotonic()
        with suppress(OSError):  # the last write tells the user
            self._document.write(_dated({**summary.to_json(), "input_records": total}, RUNNING))
        ended = time.monotonic()
        self._next = ended + max(EVERY_S, (ended - began) / SHARE)

    def _write_last(self, document: Document, summary: RunSummary, state: str) -> None:
        """Write what the run did. One that found nothing to do keeps the figures of the run that did the work."""
        before = document.read() if self._before is None else self._before
        if not self._own and not (summary.records or summary.failed) and before:
            same = self._before is not None and before.get("state", state) == state
            document.write(before if same else _dated(before, state))
            return
        total = {"input_records": self._total} if state == STOPPED else {}
        document.write(_dated({**summary.to_json(), **total}, state))


def _own_document(path: Path) -> LocalDocument:
    """Return the file of `--stats`, which replaces that of another run, but nothing else."""
    check_writable(path, "--stats")
    document = LocalDocument(path)
    if path.is_file() and path.stat().st_size and not isinstance(document.read().get("records"), int):
        raise ConfigError(f"--stats: {path} exists and holds no statistics of a run; choose another file")
    return document


def _dated(figures: dict[str, Any], state: str) -> dict[str, Any]:
    return figures | {"state": state, "updated_at": datetime.now(UTC).isoformat(timespec="seconds")}
