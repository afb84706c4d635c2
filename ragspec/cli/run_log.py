"""What a run says on stderr: a bar on a terminal, else a line from time to time, as text or as JSON.

    1,240/5,000, 310 tokens/s, 1:52 left, 3 failed
    {"time": "...", "level": "info", "event": "progress", "message": "1,240/5,000, ...", "records": 1237, ...}

With `-q` only errors and failed records remain; with `-v` every record has a line. RAGSPEC_LOG_FORMAT is the same as
`--log-format`, also for errors before a run begins.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ragspec.config.run import RunConfig
    from ragspec.outputs.answers import FailedRecord
    from ragspec.run.answering import RecordResult
    from ragspec.run.loading import Loading
    from ragspec.run.pace import Pace, Progress
    from ragspec.run.result_writer import Report
    from ragspec.stats import RunSummary

FORMAT = "RAGSPEC_LOG_FORMAT"
FORMATS = ("text", "json")
EVERY_S = 30.0


class Terminated(KeyboardInterrupt):
    """SIGTERM came. It ends a run as Ctrl-C does."""


def set_log_format(given: str | None) -> None:
    """Say everything in this form from now on. Raises ConfigError."""
    from ragspec.errors import ConfigError, did_you_mean

    if given is not None and given not in FORMATS:
        raise ConfigError(f'--log-format: "{given}" is not known{did_you_mean(given, FORMATS)}')
    if given is not None:
        os.environ[FORMAT] = given


def is_json() -> bool:
    """Return whether messages are JSON objects."""
    return os.environ.get(FORMAT) == "json"


def write_event(level: str, event: str, message: str, **fields: Any) -> None:
    """Write a message to stderr as a JSON object."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"time": now, "level": level, "event": event, "message": message, **fields}
    print(json.dumps(line, ensure_ascii=False, default=str), file=sys.stderr, flush=True)


class JsonHandler(logging.Handler):
    """Log messages of libraries as JSON objects."""

    def emit(self, record: logging.LogRecord) -> None:
        message = self.format(record)
        write_event(record.levelname.lower(), "log", message, logger=record.name)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise Terminated in this block, so that a run can end in order."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class RunLog:
    """The messages of one run.

    Args:
        console: On stderr.
        quiet: Say only what went wrong.
        verbose: Also name every record.
        every_s: Seconds between two lines about progress; 0 for none.
    """

    def __init__(self, console: Console, *, quiet: bool = False, verbose: bool = False, every_s: float = EVERY_S):
        from ragspec.run.pace import Pace

        self.console = console
        self._json = is_json()
        self._quiet = quiet
        self.observers = [self] if verbose and not quiet else []
        self._every_s = every_s
        self._bar = console.is_terminal and FORMAT not in os.environ and not quiet
        self._pace: Pace = Pace(time.monotonic())
        self._latest: tuple[RunSummary, int | None] | None = None
        self._loading: Loading | None = None
        self._ended = threading.Event()

    @contextmanager
    def watching(self, config: RunConfig) -> Iterator[Report | None]:
        """Yield what takes the run's totals as records finish; show its progress meanwhile."""
        from ragspec.cli.tables import progress
        from ragspec.run.loading import Loading

        self._loading = Loading(config)
        if self._bar:
            with progress(self.console, self._loading) as report:
                yield self._beside(report)
            return
        teller = threading.Thread(target=self._tell, name="ragspec-log", daemon=True)
        if self._every_s and not self._quiet:
            teller.start()
        try:
            yield self._report
        finally:
            self._ended.set()

    def say(self, message: str, event: str = "info", level: str = "info", **fields: Any) -> None:
        """Say a line that is no error."""
        if self._quiet:
            return
        if self._json:
            write_event(level, event, message, **fields)
        else:
            self.console.print(message, markup=False, style="yellow" if level == "warning" else None)

    def stopped(self, error: KeyboardInterrupt, where: str) -> None:
        """Say how far a run came that was stopped, and where its answers are."""
        how = "stopped by SIGTERM" if isinstance(error, Terminated) else "interrupted"
        at = self._progress(overall=True)
        message = f"{how} at {at.text()}: {where}" if at is not None and at.finished else f"{how}: {where}"
        if self._json:
            write_event("warning", "stopped", message, **(at.to_json() if at is not None else {}))
        else:
            self.console.print(message, markup=False)

    def finished(self, summary: RunSummary, output: str) -> None:
        """Say what a finished run did."""
        from ragspec.cli.tables import failure_reasons, print_summary

        if self._quiet:
            if reasons := failure_reasons(summary):
                message = f"failed: {reasons}".replace("\n", "; ")
                if self._json:
                    write_event("warning", "failures", message)
                else:
                    self.console.print(message, markup=False)
        elif self._json:
            for note in summary.notes:
                write_event("warning", "note", note)
            message = f"{summary.records:,} answered, {summary.failed:,} failed, {summary.skipped:,} finished before"
            left_out = ("config", "runner", "notes")
            figures = {name: value for name, value in summary.to_json().items() if name not in left_out}
            write_event("info", "finished", message, output=output, **figures)
        else:
            print_summary(self.console, summary, output)

    # -- progress ----------------------------------------------------------------------------------

    def _report(self, summary: RunSummary, total: int | None) -> None:
        self._latest = summary, total

    def _beside(self, report: Report) -> Report:
        def both(summary: RunSummary, total: int | None) -> None:
            self._report(summary, total)
            report(summary, total)

        return both

    def _tell(self) -> None:
        from ragspec.run.pace import LOADING

        while not self._ended.wait(self._every_s):
            at = self._progress()
            if at is not None:
                if at.phase == LOADING and self._loading is not None:
                    at = replace(at, doing=self._loading.doing())
                self.say(at.text(), "progress", **at.to_json())

    def _progress(self, *, overall: bool = False) -> Progress | None:
        from ragspec.stats import RunSummary

        summary, total = self._latest or (RunSummary(), None)
        tell = self._pace.overall if overall else self._pace.progress
        return tell(summary, total, time.monotonic())

    # -- records, with -v --------------------------------------------------------------------------

    def answered(self, result: RecordResult) -> None:
        """Say that a record was answered."""
        tokens = sum(cost.output_tokens for cost in result.costs)
        took_s = max((cost.latency_s for cost in result.costs), default=0.0)
        drafted, accepted = (sum(getattr(cost.spec, name) for cost in result.costs) for name in ("drafted", "accepted"))
        drafts = f", {accepted / drafted:.0%} of drafts accepted" if drafted else ""
        message = f"{result.id}: {result.prompt_tokens:,} prompt and {tokens:,} output tokens, {took_s:.1f} s{drafts}"
        fields: dict[str, Any] = {
            "id": result.id,
            "prompt_tokens": result.prompt_tokens,
            "output_tokens": tokens,
            "latency_s": took_s,
        }
        self.say(message, "record", **fields, drafted=drafted, accepted=accepted)

    def failed(self, failed: FailedRecord) -> None:
        """Say that a record failed."""
        self.say(f"{failed.name}: failed: {failed.message}", "record", "warning", id=failed.name, kind=failed.kind)
