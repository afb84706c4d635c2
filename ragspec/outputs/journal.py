"""The journal of an output: lines written in order as records finish, and resumed where a run ended.

Every line contains the fingerprint of its input row, so a resumed run knows the finished rows whatever the order of
lines. A line ahead of its turn waits in `answers.pending.jsonl` (line_file.py); `answers.run.json` names the config
(run_state.py). Limit: one process at a time may write an output, which a lock enforces.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import chain
from types import FrameType
from typing import Any, Self

import orjson

from ragspec.config.io import OutputConfig
from ragspec.errors import ConfigError
from ragspec.json_text import dumps
from ragspec.outputs.base import Sink, Store
from ragspec.outputs.ledger import Drop, Finished, Ledger
from ragspec.outputs.line_file import MemorySpill, Spill, SpillPosition, free_number
from ragspec.outputs.target import OutStream, Target, opening_errors, target_of
from ragspec.outputs.update import Update
from ragspec.stats import Causes, OutputTotals, RunSummary, Spent


class Interruptions:
    """Defers Ctrl-C, and SIGTERM if it is handled, to the end of a `held_back` block, so that a line and its counts
    cannot disagree.

        >>> with Interruptions() as interruptions:
        ...     with interruptions.held_back():
        ...         pass

    Limit: Python interrupts only the main thread; in another thread this does nothing.
    """

    def __init__(self) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._holding = False
        self._held = 0  # the signal

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            # keep a handler that ignores the signal or belongs to a C library
            if threading.current_thread() is threading.main_thread() and callable(before):
                self._before[number] = before
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._before = {}

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Defer an interruption to the end of the block. Keep the block short."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            if held := self._held:
                self._held = 0
                signal.raise_signal(held)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._held = number
        elif number in self._before:
            self._before[number](number, frame)


# -- journal ---------------------------------------------------------------------------------------

LOST_S, LOST = 1.0, 0.05  # a killed run loses at most this much of its recorded time: seconds, or a share of it


def whereabouts(target: Target | None) -> str:
    """Return for a message where the finished lines are and how to continue."""
    if target is None:
        return "finished answers have been written"
    try:
        places = target.whereabouts()
    except OSError:  # the target is unreachable
        places = [target.name]
    kept = f"finished answers are kept in {' and '.join(places)}" if places else "nothing was finished yet"
    return f"{kept}; run the same command again to continue"


class Journal:
    """Writes output lines in the requested order and knows which input rows are finished.

    Args:
        output: a config section, a path, - for stdout, or a sink, which cannot be resumed.
        identity: the part of the config that a resumed run must share; None for an output that is never resumed.
        order: "input" or "finish".
        resume: keep the finished lines of an earlier run; else rename them.
        retry_failed: answer failed records again.
        partial: only a part of the input is read, so lines waiting from earlier runs may belong to the rest.
        among: keys of the rows that `retry_failed` applies to, None for all.
        update: the output while it is updated, open already; then `resume`, `retry_failed` and `partial` are its own.

    Raises:
        ConfigError: the output cannot be opened, or was begun with another config.
    """

    def __init__(
        self,
        output: OutputConfig | str | Sink,
        identity: dict[str, Any] | None = None,
        *,
        order: str = "input",
        resume: bool = True,
        retry_failed: bool = False,
        partial: bool = False,
        among: Container[str] | None = None,
        update: Update | None = None,
    ) -> None:
        config = OutputConfig(path=output) if isinstance(output, str) else output
        self.target = target_of(config) if isinstance(config, OutputConfig) else None
        self.ledger = update.ledger if update else Ledger()
        self.output = str(config.path) if isinstance(config, OutputConfig) else "memory"
        self._in_order = order == "input" and update is None  # which puts its lines in their places itself
        self._partial = partial
        self._drop: Drop | None = None
        if retry_failed:
            self._drop = lambda found: found.failed and (among is None or found.key in among)
        self._resumable = identity is not None
        self._next_spent = 0.0  # seconds of this run after which its time is recorded again
        self._interruptions = Interruptions()
        self._next = 0
        # [begin, end) ranges of lines that are already written and whose turn has not come
        self._skipped: deque[tuple[int, int]] = deque()
        self._ahead: Spill | MemorySpill = MemorySpill()
        self._store: Store | Update | None = None
        self._file: Sink
        if update is not None and identity is not None:
            self._file = self._store = update
            with opening_errors(self.output):
                update.begin(_spent(update.target), config.include if isinstance(config, OutputConfig) else ())
            self.target = update.target
        elif not isinstance(config, OutputConfig):
            self._file = config
        elif self.target is not None:
            self._file = self._store = self._open(self.target, identity, resume, config.include)
        else:
            with opening_errors(self.output):
                self._file = OutStream(self.output)

    def __enter__(self) -> Self:
        self._interruptions.__enter__()
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                with self._writing():
                    self._end()
            else:
                with suppress(OSError):  # the run's own error takes precedence
                    self._abort()
        finally:
            self._interruptions.__exit__()
            self._ahead.close()
            self._file.close()

    def put(self, index: int, line: dict[str, Any] | bytes, counted: Callable[[], None] = lambda: None) -> None:
        """Write output line number `index`, or store it on disk until the lines before it are written.

        Args:
            index: the line's number.
            line: the line's value, or its bytes without a line end.
            counted: called once the line is on disk.

        Raises:
            TypeError: `line` cannot be JSON (nested too deeply, for instance); nothing is written.
            ConfigError: the output cannot be written (a full disk, for instance).
        """
        encoded = line + b"\n" if isinstance(line, bytes) else dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        with self._writing():
            if self._in_order and index != self._next:
                self._ahead.add(index, encoded)
            else:
                self._file.append(encoded)
                self._next += 1
            counted()
            self._take_turns()

    def stop_early(self) -> None:
        """Let lines that wait for earlier ones wait for the next run: this one does not reach the input's end."""
        self._partial = True

    @property
    def spent(self) -> Spent:
        """Return the time of earlier runs."""
        return self.target.state.spent if self.target is not None else Spent()

    def skip(self, index: int, key: str) -> None:
        """Mark line number `index` as finished by an earlier run. Indices must increase. key: its fingerprint."""
        if not self._in_order:
            return
        self._ahead.claim(index, key)
        if index not in self._ahead:
            begin = self._skipped.pop()[0] if self._skipped and self._skipped[-1][1] == index else index
            self._skipped.append((begin, index + 1))  # ranges, since millions may be skipped behind a retried line
        with self._writing():
            self._take_turns()

    def _take_turns(self) -> None:
        """Write the lines whose turn has come."""
        while self._in_order:
            if self._next in self._ahead:
                self._file.append(self._ahead.get(self._next))
                self._ahead.drop(self._next)
                self._next += 1
            elif self._skipped and self._skipped[0][0] == self._next:
                self._next = self._skipped.popleft()[1]
            else:
                return

    def _end(self) -> None:
        if not self._partial:
            for line in self._ahead.rest():
                self._file.append(line)
        self._file.sync()
        if self._store is not None:
            self._store.finish()
        if not self._partial:
            self._ahead.remove()

    def _abort(self) -> None:
        if isinstance(self._ahead, MemorySpill):  # no later run can pick up these lines
            for line in self._ahead.rest():
                self._file.append(line)
        self._ahead.sync()
        self._file.sync()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep the file and the counts consistent under Ctrl-C; a wait for a full pipe stays interruptible."""
        with self._interruptions.held_back() if self.target else nullcontext():
            try:
                yield
            except BrokenPipeError:
                raise
            except OSError as error:
                kept = f"; {whereabouts(self.target)}" if self.target else ""
                where = error.filename or self.output
                raise ConfigError(f"{where}: cannot be written ({error.strerror}){kept}") from None

    def _open(self, target: Target, identity: dict[str, Any] | None, resume: bool, include: Sequence[str]) -> Store:
        if identity is not None:
            target.state.check_names()
        spill = None
        spent = Spent()
        kept = False
        with ExitStack() as opened, opening_errors(target.name):
            store = target.open()
            opened.callback(store.close)
            if identity is not None:
                spill = self._ahead = Spill(target.pending)
                opened.callback(spill.close)
            began = store.begun or (spill is not None and spill.size)
            if target.updates.exists():
                if resume and identity is not None:
                    raise ConfigError(
                        f"{target.name}: its update was interrupted; finish it with --update, or delete "
                        f"{target.updates} (the new answers) to discard it"
                    )
                target.updates.rename(f"{target.updates}.{free_number(target.updates)}")
            if began and (identity is None or not resume):
                store.set_aside(spill)
            elif began and identity is not None and spill is not None:
                kept = self._keeps_answers(target, identity, store, spill)
                spent = _spent(target)
                self._resume(store, spill)
            if identity is not None:
                target.state.begin(identity, spent, kept=kept, include=include)
            opened.pop_all()
        return store

    def _keeps_answers(self, target: Target, identity: dict[str, Any], store: Store, spill: Spill) -> bool:
        """Return whether existing answers stay; False if all are retried, so that any config may do it.

        Raises ConfigError if answers of another config would stay.
        """
        try:
            target.state.check_config(identity, retrying=self._drop is not None)
        except ConfigError:
            if self._drop is None or not _all_dropped(store, spill, self._drop):
                raise
            return False
        return True

    def _resume(self, store: Store, spill: Spill) -> None:
        for found in store.finished(self._drop):
            self.ledger.note(found)
        waiting: dict[str, SpillPosition] = {}
        foreign = False
        for place, line in spill.lines():
            found = Finished.of(line)
            foreign |= found.key is None
            # a line in both files was moved to the output when the run was killed
            dropped = self._drop is not None and self._drop(found)
            if found.key is not None and found.key not in self.ledger and not dropped:
                waiting[found.key] = place
                self.ledger.note(found)
        if foreign:
            spill.copy_aside(free_number(spill.path))
        spill.keep(waiting)
        if not self._in_order:
            for line in spill.rest():
                store.append(line)
            store.sync()
            spill.remove()

    @property
    def signature(self) -> str:
        """Return the config's digest for the lines, "" for the config that began the output."""
        return self.target.state.signature if self.target is not None else ""

    def notes(self) -> list[str]:
        """Return what the user should know of the earlier lines."""
        notes = []
        if self.ledger.foreign:
            notes.append(
                f"{self.output}: lines that are damaged, or not ragspec's: {self.ledger.foreign}; they stay, and "
                "answer no record"
            )
        if self.ledger.repeated:
            notes.append(
                f"{self.output}: lines for a record that an earlier line has finished: {self.ledger.repeated}; they "
                "stay, and are counted; delete them, or start over with --no-resume"
            )
        lacking = self.target.state.lacking if self.target is not None else []
        if lacking and self.ledger.answers:
            without = " and ".join(lacking)
            notes.append(f"{self.output}: lines of an earlier run have no {without}; use --no-resume to start over")
        return notes

    def keep_spent(self, summary: RunSummary) -> None:
        """Record the time spent by all runs at intervals, so that a killed run loses little of it."""
        spent = summary.load_s + summary.warmup_s + summary.generate_s
        if self.target is None or not self._resumable or spent < self._next_spent:
            return
        self._next_spent = spent + max(LOST_S, LOST * spent)
        with suppress(OSError):  # the next line reports a full disk
            self.target.state.keep_spent(summary)

    def totals(self, summary: RunSummary) -> OutputTotals | None:
        """Return what the output holds after this run and the time of all runs; None if it cannot be resumed."""
        if self.target is None or not self._resumable:
            return None
        ledger, state = self.ledger, self.target.state
        worked = bool(summary.records or summary.failed)
        if worked:
            with suppress(OSError):
                state.keep_spent(summary)
        failures = Causes()
        failures.merge(ledger.failures)
        failures.merge(summary.failures)
        return OutputTotals(
            records=ledger.answers + summary.records,
            failed=failures.records,
            prompt_tokens=ledger.prompt_tokens + summary.prompt_tokens,
            output_tokens=ledger.output_tokens + summary.listed_tokens,
            spent=state.spent_with(summary) if worked else state.spent,
            failures=failures,
        )


def _all_dropped(store: Store, spill: Spill, drop: Drop) -> bool:
    waiting = (Finished.of(line) for _, line in spill.lines())
    return all(drop(found) for found in chain(store.finished(), waiting))


def _spent(target: Target) -> Spent:
    """Return the time of earlier runs; for an output from before it was recorded, that of the latest statistics."""
    found = Spent.of(target.state.read().get("spent"))
    return found if found.runs else Spent.of(target.statistics.read(), runs=1)
