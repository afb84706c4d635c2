"""Ctrl-C held back while a line is written and counted, so that the two never disagree.

    >>> with Interruptions() as interruptions:
    ...     with interruptions.held_back():
    ...         pass

Limit: only the main thread is ever interrupted; entered in another one, this does nothing.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator
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
from ragspec.outputs.target import OutStream, Target, target_of
from ragspec.stats import Causes, OutputTotals, RunSummary, Spent


class Interruptions:
    """While entered, an interruption comes as usual, but not before the end of a `held_back` block."""

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._holding = False
        self._held = False

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        # a signal that is ignored, or that a C library handles, stays so
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._before)
        self._before = None

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Let an interruption come when the block is over. Keep it short."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            if self._held:
                self._held = False
                signal.raise_signal(signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._held = True
        elif self._before is not None:
            self._before(number, frame)


# -- the output: line by line as records finish, resumed where it ended -----------------------------------------------
#
# A line contains the fingerprint of the input line that it answers, so a resumed run knows what is finished in whatever
# order the lines are. Finished means on disk: a line ahead of its turn waits in `answers.pending.jsonl` (line_file.py),
# beside `answers.run.json`, which names the config (run_state.py). Limit: one process at a time may write an output (a
# lock sees to that).


LOST_S, LOST = 1.0, 0.05  # seconds, or the share of them, that a run which is killed may lose of what it took


def whereabouts(target: Target | None) -> str:
    """Return where the finished lines of a run that ended early are, and how to go on, for a message."""
    if target is None:
        return "finished answers have been written"
    try:
        places = target.whereabouts()
    except OSError:  # it cannot be asked any more
        places = [target.name]
    kept = f"finished answers are kept in {' and '.join(places)}" if places else "nothing was finished yet"
    return f"{kept}; run the same command again to continue"


class Journal:
    """Writes output lines in the asked order and knows which input lines are finished already.

    output: what a config says (or a path, or - for stdout), or a sink (nothing to resume there). identity: what a
    resumed run must agree on; None for an output that is never resumed. partial: whether only a part of the input is
    read, so that what an earlier run left may belong to the rest of it. among: keys of the rows that `retry_failed`
    means, None for all.
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
    ) -> None:
        config = OutputConfig(path=output) if isinstance(output, str) else output
        self.target = target_of(config) if isinstance(config, OutputConfig) else None
        self.ledger = Ledger()
        self.output = str(config.path) if isinstance(config, OutputConfig) else "memory"
        self._in_order = order == "input"
        self._partial = partial
        self._drop: Drop | None = None
        if retry_failed:
            self._drop = lambda found: found.failed and (among is None or found.key in among)
        self._resumable = identity is not None
        self._next_spent = 0.0  # seconds of this run, at which they are written again
        self._interruptions = Interruptions()
        self._next = 0
        # runs of lines that have nothing to write and whose turn has not come
        self._silent: deque[tuple[int, int]] = deque()
        self._ahead: Spill | MemorySpill = MemorySpill()
        self._store: Store | None = None
        self._file: Sink
        if not isinstance(config, OutputConfig):
            self._file = config
        elif self.target is not None:
            self._file = self._store = self._open(self.target, identity, resume)
        else:
            with _opening(self.output):
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
                with suppress(OSError):  # the run has an error of its own to tell
                    self._break_off()
        finally:
            self._interruptions.__exit__()
            self._ahead.close()
            self._file.close()

    def put(self, index: int, line: dict[str, Any] | bytes, counted: Callable[[], None] = lambda: None) -> None:
        """Write output line number `index`; on disk, it waits for those before it. bytes: as it is, without a line end.

        counted: called when the line is on disk, and never otherwise. Raises TypeError, nothing written, if `line`
        cannot be JSON (nested too deeply, say); ConfigError on a full disk.
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

    def skip(self, index: int, key: str) -> None:
        """Treat line number `index`, higher than all skipped before, as the finished one with that fingerprint."""
        if not self._in_order:
            return
        self._ahead.claim(index, key)
        if index not in self._ahead:
            begin = self._silent.pop()[0] if self._silent and self._silent[-1][1] == index else index
            self._silent.append((begin, index + 1))  # millions may be skipped behind one that is tried again
        with self._writing():
            self._take_turns()

    def _take_turns(self) -> None:
        """Write what has waited for the line that was written last."""
        while self._in_order:
            if self._next in self._ahead:
                self._file.append(self._ahead.get(self._next))
                self._ahead.drop(self._next)
                self._next += 1
            elif self._silent and self._silent[0][0] == self._next:
                self._next = self._silent.popleft()[1]
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

    def _break_off(self) -> None:
        if isinstance(self._ahead, MemorySpill):  # nobody comes back for what waits
            for line in self._ahead.rest():
                self._file.append(line)
        self._ahead.sync()
        self._file.sync()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep a file and the counts in agreement, whenever Ctrl-C comes; waiting for a full pipe is interrupted."""
        with self._interruptions.held_back() if self.target else nullcontext():
            try:
                yield
            except BrokenPipeError:
                raise
            except OSError as error:
                kept = f"; {whereabouts(self.target)}" if self.target else ""
                where = error.filename or self.output
                raise ConfigError(f"{where}: cannot be written ({error.strerror}){kept}") from None

    # -- an output that keeps its lines ---------------------------------------------------------------------------

    def _open(self, target: Target, identity: dict[str, Any] | None, resume: bool) -> Store:
        if identity is not None:
            target.state.check_names()
        spill = None
        spent = Spent()
        kept = False
        with ExitStack() as opened, _opening(target.name):
            store = target.open()
            opened.callback(store.close)
            if identity is not None:
                spill = self._ahead = Spill(target.pending)
                opened.callback(spill.close)
            began = store.begun or (spill is not None and spill.size)
            if began and (identity is None or not resume):
                store.set_aside(spill)
            elif began and identity is not None and spill is not None:
                kept = self._agrees(target, identity, store, spill)
                spent = _spent(target)
                self._resume(store, spill)
            if identity is not None:
                target.state.begin(identity, spent, kept=kept)
            opened.pop_all()
        return store

    def _agrees(self, target: Target, identity: dict[str, Any], store: Store, spill: Spill) -> bool:
        """Return whether answers that are there stay; False where all is tried again, so that any config may do it.

        Raises ConfigError if they would stay beside those of a config that they do not go with.
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
            # what is in the output too was moved there when the run was killed
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
        """What lines say of the config that answers them: "" where it is the one that began the output."""
        return self.target.state.signature if self.target is not None else ""

    def keep_spent(self, summary: RunSummary) -> None:
        """Write now and then what the runs of this output took: a run that is killed loses little of it."""
        spent = summary.load_s + summary.warmup_s + summary.generate_s
        if self.target is None or not self._resumable or spent < self._next_spent:
            return
        self._next_spent = spent + max(LOST_S, LOST * spent)
        with suppress(OSError):  # a full disk is told of by the next line
            self.target.state.keep_spent(summary)

    def totals(self, summary: RunSummary) -> OutputTotals | None:
        """Return what the output holds after this run, and what all its runs took; None of one that is not resumed."""
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
            output_tokens=ledger.output_tokens + summary.output_tokens,
            spent=state.spent_with(summary) if worked else state.spent,
            failures=failures,
        )


def _all_dropped(store: Store, spill: Spill, drop: Drop) -> bool:
    waiting = (Finished.of(line) for _, line in spill.lines())
    return all(drop(found) for found in chain(store.finished(), waiting))


def _spent(target: Target) -> Spent:
    """Return what earlier runs took; of an output from before that was kept, what its statistics say of the latest."""
    found = Spent.of(target.state.read().get("spent"))
    return found if found.runs else Spent.of(target.statistics.read(), runs=1)


@contextmanager
def _opening(output: str) -> Iterator[None]:
    """Say in one line why an output cannot be opened."""
    try:
        yield
    except BlockingIOError:
        raise ConfigError(f"{output}: another run is writing it; wait for it, or choose another --output") from None
    except OSError as error:
        where = error.filename or output
        raise ConfigError(f"{where}: cannot be written ({error.strerror}); choose another --output") from None
