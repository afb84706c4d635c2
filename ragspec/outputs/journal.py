"""The output file: appended line by line as records finish, resumed where it ended.

A line contains the fingerprint of the input line that it answers, so a resumed run knows what is finished in whatever
order the lines are. Finished means on disk: a line ahead of its turn waits in `answers.pending.jsonl` (spill.py),
beside `answers.run.json`, which names the config (runstate.py). Limit: one process at a time may write an output (a
lock sees to that).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any, Self

import orjson

from ragspec.errors import ConfigError
from ragspec.outputs.base import Sink
from ragspec.outputs.interrupt import Interruptions
from ragspec.outputs.ledger import Finished, Ledger
from ragspec.outputs.linefile import LineFile
from ragspec.outputs.outstream import OutStream
from ragspec.outputs.runstate import PENDING, RunState, sibling
from ragspec.outputs.spill import Place, Shelf, Spill


def is_resumable(output: str) -> bool:
    """Return whether `output` is a file: pipes and devices (/dev/null, >(...)) take lines and keep none."""
    path = Path(output)
    return output != "-" and not output.startswith("/dev/") and (not path.exists() or path.is_file())


def whereabouts(output: str) -> str:
    """Return where the finished lines of a run that ended early are, and how to go on, for a message."""
    if not is_resumable(output):
        return "finished answers have been written"
    pending = sibling(output, PENDING)
    names = {Path(output): output, pending: f"{pending} (answers waiting for earlier ones)"}
    places = [name for path, name in names.items() if path.exists() and path.stat().st_size]
    kept = f"finished answers are kept in {' and '.join(places)}" if places else "nothing was finished yet"
    return f"{kept}; run the same command again to go on"


class Journal:
    """Writes output lines in the asked order and knows which input lines are finished already.

    output: a path, or - for stdout, or a sink (nothing to resume there). identity: what a resumed run must agree on;
    None for a file that is never resumed. partial: whether only a part of the input is read, so that what an earlier
    run left may belong to the rest of it.
    """

    def __init__(
        self,
        output: str | Sink,
        identity: dict[str, Any] | None = None,
        *,
        order: str = "input",
        resume: bool = True,
        retry_failed: bool = False,
        partial: bool = False,
    ) -> None:
        self.output = output if isinstance(output, str) else "memory"
        self.ledger = Ledger()
        self.resumable = isinstance(output, str) and is_resumable(output)
        self._in_order = order == "input"
        self._partial = partial
        self._interruptions = Interruptions()
        self._next = 0
        # runs of lines that have nothing to write and whose turn has not come
        self._silent: deque[tuple[int, int]] = deque()
        self._ahead: Spill | Shelf = Shelf()
        self._file: Sink
        if not isinstance(output, str):
            self._file = output
        elif self.resumable:
            self._open(identity, resume, retry_failed)
        else:
            with _opening(output):
                self._file = OutStream(output)

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
        encoded = line + b"\n" if isinstance(line, bytes) else orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
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
        if not self._partial:
            self._ahead.remove()

    def _break_off(self) -> None:
        if isinstance(self._ahead, Shelf):  # nobody comes back for what waits
            for line in self._ahead.rest():
                self._file.append(line)
        self._ahead.sync()
        self._file.sync()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep a file and the counts in agreement, whenever Ctrl-C comes; waiting for a full pipe is interrupted."""
        with self._interruptions.held_back() if self.resumable else nullcontext():
            try:
                yield
            except BrokenPipeError:
                raise
            except OSError as error:
                kept = f"; {whereabouts(self.output)}" if self.resumable else ""
                where = error.filename or self.output
                raise ConfigError(f"{where}: cannot be written ({error.strerror}){kept}") from None

    # -- an output that is a file ---------------------------------------------------------------------------------

    def _open(self, identity: dict[str, Any] | None, resume: bool, retry_failed: bool) -> None:
        path = Path(self.output)
        if path.suffix in (".gz", ".zst"):
            raise ConfigError(
                f"{path}: answers are appended one by one, which {path.suffix} does not allow; "
                "compress the file afterwards"
            )
        state = RunState(self.output)
        spill = None
        if identity is not None:
            state.check_names()
        with ExitStack() as opened, _opening(self.output):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._file = LineFile(path)
            opened.callback(file.close)
            if identity is not None:
                spill = self._ahead = Spill(sibling(self.output, PENDING))
                opened.callback(spill.close)
            began = file.size or (spill is not None and spill.size)
            if began and (identity is None or not resume):
                _set_aside(file, spill)
            elif began and identity is not None and spill is not None:
                state.check_config(identity)
                self._resume(file, spill, retry_failed)
            if identity is not None:
                state.write(identity)
            opened.pop_all()

    def _resume(self, file: LineFile, spill: Spill, retry_failed: bool) -> None:
        file.cut_torn_line()
        if retry_failed:
            file.replace(line for _, line in file if not Finished.of(line).failed)
        for _, line in file:
            self.ledger.note(Finished.of(line))
        waiting: dict[str, Place] = {}
        foreign = False
        for place, line in spill.lines():
            found = Finished.of(line)
            foreign |= found.key is None
            # what is in the output too was moved there when the run was killed
            if found.key is not None and found.key not in self.ledger and not (found.failed and retry_failed):
                waiting[found.key] = place
                self.ledger.note(found)
        if foreign:
            spill.copy_aside(_free_number(spill.path))
        spill.keep(waiting)
        if not self._in_order:
            for line in spill.rest():
                file.append(line)
            file.sync()
            spill.remove()


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


def _set_aside(file: LineFile, spill: Spill | None) -> None:
    """Move what is not to be resumed to NAME.1, NAME.2, ...: nothing written is ever lost."""
    number = _free_number(file.path, *([spill.path] if spill else []))
    if spill:
        spill.set_aside(number)
    if file.size:
        file.set_aside(number)


def _free_number(*paths: Path) -> int:
    return next(n for n in count(1) if not any(path.with_name(f"{path.name}.{n}").exists() for path in paths))
