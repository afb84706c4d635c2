"""A file of whole lines that one process at a time writes.

    >>> file = LineFile(Path("answers.jsonl")); file.append(b"{}\\n"); file.close()

What is appended survives the process being killed right after; a power cut only spares what `sync` was called for.
Limit: the lock is advisory, and the file system must support it (flock).
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple

from ragspec.host.files import sync_folder
from ragspec.outputs.ledger import Drop, Finished

BLOCK = 1 << 16


class LineFile:
    """`path`, created if missing, open and locked. If it is a link, the file that it leads to.

    Raises BlockingIOError if another process has locked it, else OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self._file = _locked(self.path)

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, line: bytes) -> int:
        """Write a line at the end and return where it begins. Raises OSError, the file as it was before."""
        begin = self.size
        try:
            write_all(self._file, line)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), begin)  # half a line does not count
            error.filename = str(self.path)
            raise
        return begin

    def read(self, begin: int, length: int) -> bytes:
        """Return `length` bytes from `begin` on."""
        pieces = []
        while length > 0 and (piece := os.pread(self._file.fileno(), length, begin)):
            pieces.append(piece)
            begin, length = begin + len(piece), length - len(piece)
        return b"".join(pieces)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield where each line begins, and the line."""
        begin = 0
        with self.path.open("rb") as file:
            for line in file:
                yield begin, line
                begin += len(line)

    def cut_torn_line(self) -> None:
        """Cut off a last line without its line end, as a killed run leaves it."""
        size = end = self.size
        while end > 0:
            start = max(0, end - BLOCK)
            newline = self.read(start, end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._file.fileno(), end)

    def empty(self) -> None:
        """Remove all lines."""
        os.ftruncate(self._file.fileno(), 0)

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace all lines by `lines`: completely or not at all, whatever happens meanwhile."""
        draft = self.path.with_name(f".{self.path.name}.draft")
        draft.unlink(missing_ok=True)
        fresh = _locked(draft)
        try:
            with draft.open("wb") as writer:
                writer.writelines(lines)
                writer.flush()
                os.fsync(writer.fileno())
            shutil.copymode(self.path, draft)
            draft.replace(self.path)
        except BaseException:
            fresh.close()
            draft.unlink(missing_ok=True)
            raise
        sync_folder(self.path.parent)
        self._file.close()
        self._file = fresh

    def move_aside(self, number: int) -> None:
        """Move it to NAME.number, and begin an empty one."""
        self.path.rename(self.path.with_name(f"{self.path.name}.{number}"))
        sync_folder(self.path.parent)
        self._file.close()
        self._file = _locked(self.path)

    def sync(self) -> None:
        """Let what is written survive a power cut."""
        os.fsync(self._file.fileno())
        sync_folder(self.path.parent)

    def remove(self) -> None:
        """Delete it, and close it."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close it, which frees the lock."""
        self._file.close()


def write_all(file: IO[bytes] | Any, data: bytes) -> None:
    """Write all of `data`, for files without a buffer, which may take a part of it."""
    left = memoryview(data)
    while left:
        written = file.write(left)
        if written is None:  # somebody made it non-blocking
            raise BlockingIOError(11, "it is not accepting data right now")
        left = left[written:]


def _locked(path: Path) -> IO[bytes]:
    """Return a file without a buffer, locked, that `path` names."""
    while True:
        file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(path, file):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # between opening and locking, its owner has put another in its place


def _is_named(path: Path, file: IO[bytes]) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(file.fileno()))


# -- finished lines that are ahead of their turn: on disk at once; only their places are in memory --------------------
#
#     >>> spill = Spill(Path("answers.pending.jsonl")); spill.add(7, b"{}\n"); spill.get(7); spill.drop(7)
#
# A line is dropped once it is in the output. Being killed between the two leaves it in both; whoever reads the file
# again leaves out what the output has.


SLACK = 16 << 20  # bytes of dropped lines, beyond as much as still waits, from which on the file is rewritten


class SpillPosition(NamedTuple):
    """Where a line is."""

    begin: int
    length: int


class MemorySpill:
    """The same in memory, for an output that cannot be resumed anyway."""

    def __init__(self) -> None:
        self._lines: dict[int, bytes] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._lines

    def add(self, index: int, line: bytes) -> None:
        """Keep the line number `index` until its turn."""
        self._lines[index] = line

    def claim(self, index: int, key: str) -> None:
        """Do nothing: no earlier run left anything here."""

    def get(self, index: int) -> bytes:
        """Return a line."""
        return self._lines[index]

    def drop(self, index: int) -> None:
        """Forget a line: it is written."""
        del self._lines[index]

    def rest(self) -> Iterator[bytes]:
        """Yield all that waits, in the order of the input."""
        yield from (self._lines[index] for index in sorted(self._lines))

    def sync(self) -> None:
        """Nothing of it survives a power cut."""

    def remove(self) -> None:
        """Forget all lines."""
        self._lines.clear()

    def close(self) -> None:
        """Nothing is open."""


class Spill:
    """The lines that wait, in the file `path`, which is there only while it is needed. All methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: LineFile | None = LineFile(path) if path.exists() else None
        self._waiting: dict[int, SpillPosition] = {}
        self._unclaimed: dict[
            str, SpillPosition
        ] = {}  # lines of an earlier run, by fingerprint, whose turn is not known yet
        self._live = 0  # bytes of both

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size if self._file else 0

    def __contains__(self, index: int) -> bool:
        return index in self._waiting

    def lines(self) -> Iterator[tuple[SpillPosition, bytes]]:
        """Yield the whole lines that an earlier run left, and where they are."""
        if self._file:
            self._file.cut_torn_line()
            for begin, line in self._file:
                yield SpillPosition(begin, len(line)), line

    def keep(self, found: dict[str, SpillPosition]) -> None:
        """Keep, of what an earlier run left, these lines by their fingerprints, and nothing else."""
        self._unclaimed = found
        self._live = sum(place.length for place in found.values())
        if self._live != self.size:
            self._write_anew()

    def add(self, index: int, line: bytes) -> None:
        """Write the line number `index`, which has to wait for its turn."""
        if self._file is None:
            self._file = LineFile(self.path)
        elif self._file.size > 2 * self._live + SLACK:
            self._write_anew()
        self._waiting[index] = SpillPosition(self._file.append(line), len(line))
        self._live += len(line)

    def claim(self, index: int, key: str) -> None:
        """Give a line of an earlier run its turn, if it left one of that fingerprint."""
        if (place := self._unclaimed.pop(key, None)) is not None:
            self._waiting[index] = place

    def get(self, index: int) -> bytes:
        """Return a line."""
        return self._read(self._waiting[index])

    def drop(self, index: int) -> None:
        """Forget a line: it is in the output."""
        self._live -= self._waiting.pop(index).length
        if not self._live and self._file:
            self._file.empty()

    def rest(self) -> Iterator[bytes]:
        """Yield all that waits in the order of the input, then what nobody claimed."""
        for place in [self._waiting[index] for index in sorted(self._waiting)] + list(self._unclaimed.values()):
            yield self._read(place)

    def set_aside(self, number: int) -> None:
        """Move what an earlier run left to NAME.number."""
        if self._file and self._file.size:
            self._file.move_aside(number)

    def copy_aside(self, number: int) -> None:
        """Copy what an earlier run left to NAME.number."""
        shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.{number}"))

    def sync(self) -> None:
        """Let what waits survive a power cut."""
        if self._file:
            self._file.sync()

    def remove(self) -> None:
        """Delete the file: all is in the output."""
        self._waiting, self._unclaimed, self._live = {}, {}, 0
        if self._file:
            self._file.remove()
            self._file = None

    def close(self) -> None:
        """Close the file. An empty one is deleted."""
        if self._file:
            if self._file.size:
                self._file.close()
            else:
                self._file.remove()

    def _read(self, place: SpillPosition) -> bytes:
        assert self._file is not None
        return self._file.read(*place)

    def _write_anew(self) -> None:
        """Leave out of the file what is in the output by now."""
        assert self._file is not None
        waiting, unclaimed = dict(self._waiting), dict(self._unclaimed)
        places = [*waiting.values(), *unclaimed.values()]
        self._file.replace(self._read(place) for place in places)
        begin = 0
        moved = []
        for place in places:
            moved.append(SpillPosition(begin, place.length))
            begin += place.length
        self._waiting = dict(zip(waiting, moved, strict=False))
        self._unclaimed = dict(zip(unclaimed, moved[len(waiting) :], strict=True))


# -- an output that is one local file, appended line by line ----------------------------------------------------------
#
# >>> store = Appended(Path("answers.jsonl")); store.append(b"{}\n"); store.finish()


class Appended(LineFile):
    """The file `path`, as a store."""

    @property
    def begun(self) -> bool:
        """Whether it has lines."""
        return self.size > 0

    def finished(self, drop: Drop | None = None) -> Iterator[Finished]:
        """Cut off what is torn, leave out the lines to `drop`, and yield what the others finish."""
        self.cut_torn_line()
        if drop is not None:
            self.replace(line for _, line in self if not drop(Finished.of(line)))
        return (Finished.of(line) for _, line in self)

    def set_aside(self, spill: Spill | None) -> None:
        """Move what is not to be resumed to NAME.1, NAME.2, ...: nothing written is ever lost."""
        number = free_number(self.path, *([spill.path] if spill else []))
        if spill:
            spill.set_aside(number)
        if self.size:
            self.move_aside(number)

    def finish(self) -> None:
        """Nothing is left to do."""


def free_number(*paths: Path) -> int:
    """Return the first number n for which no NAME.n is there."""
    return next(n for n in count(1) if not any(path.with_name(f"{path.name}.{n}").exists() for path in paths))
