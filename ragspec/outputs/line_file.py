"""Files of whole lines, written by one process at a time: an output, and lines waiting for their turn.

    >>> file = LineFile(Path("answers.jsonl")); file.append(b"{}\\n"); file.close()

An appended line survives the process being killed; only `sync` makes it survive a power failure. Limit: the lock is
advisory, and the file system must support it (flock).
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from ragspec.host.files import sync_folder
from ragspec.outputs.ledger import Drop, Finished

if TYPE_CHECKING:
    from ragspec.outputs.base import Change

BLOCK = 1 << 16


class LineFile:
    """`path`, created if missing, open and locked. A symbolic link is resolved.

    Raises BlockingIOError if another process holds the lock, else OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self._file = _locked(self.path)

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, line: bytes) -> int:
        """Append a line and return its offset. On OSError, the file is as before."""
        begin = self.size
        try:
            write_all(self._file, line)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), begin)  # remove the partial line
            error.filename = str(self.path)
            raise
        return begin

    def read(self, begin: int, length: int) -> bytes:
        """Return `length` bytes from offset `begin`."""
        pieces = []
        while length > 0 and (piece := os.pread(self._file.fileno(), length, begin)):
            pieces.append(piece)
            begin, length = begin + len(piece), length - len(piece)
        return b"".join(pieces)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield each line with its offset."""
        begin = 0
        with self.path.open("rb") as file:
            for line in file:
                yield begin, line
                begin += len(line)

    def cut_torn_line(self) -> None:
        """Remove a last line without a line end, which a killed run leaves."""
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
        """Replace all lines with `lines` atomically."""
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

    def keep_only(self, stays: Callable[[Finished], bool]) -> list[Finished]:
        """Remove all other lines, and return what those that stay finish."""
        kept: list[Finished] = []

        def lines() -> Iterator[bytes]:
            for _, line in self:
                found = Finished.of(line)
                if stays(found):
                    kept.append(found)
                    yield line

        self.replace(lines())
        return kept

    def move_aside(self, number: int) -> None:
        """Rename the file to NAME.number and start an empty one."""
        self.path.rename(self.path.with_name(f"{self.path.name}.{number}"))
        sync_folder(self.path.parent)
        self._file.close()
        self._file = _locked(self.path)

    def sync(self) -> None:
        """Make written lines survive a power failure."""
        os.fsync(self._file.fileno())
        sync_folder(self.path.parent)

    def remove(self) -> None:
        """Delete and close the file."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the file and release the lock."""
        self._file.close()

    def close_or_remove(self) -> None:
        """Close the file, and delete it if empty."""
        if self.size:
            self.close()
        else:
            self.remove()


def write_all(file: IO[bytes] | Any, data: bytes) -> None:
    """Write all of `data` to an unbuffered file, which may accept only a part at once."""
    left = memoryview(data)
    while left:
        written = file.write(left)
        if written is None:  # the file is non-blocking
            raise BlockingIOError(11, "it is not accepting data right now")
        left = left[written:]


def _locked(path: Path) -> IO[bytes]:
    """Return `path` open, unbuffered and locked."""
    while True:
        file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(path, file):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # replaced by its previous owner between open and lock


def _is_named(path: Path, file: IO[bytes]) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(file.fileno()))


# -- waiting lines ---------------------------------------------------------------------------------

SLACK = 16 << 20  # bytes of dropped lines, in excess of the waiting bytes, that trigger a rewrite


class SpillPosition(NamedTuple):
    """The byte range of a line."""

    begin: int
    length: int


class MemorySpill:
    """A Spill in memory, for an output that cannot be resumed."""

    def __init__(self) -> None:
        self._lines: dict[int, bytes] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._lines

    def add(self, index: int, line: bytes) -> None:
        """Store line number `index`."""
        self._lines[index] = line

    def claim(self, index: int, key: str) -> None:
        """Do nothing: there are no lines of an earlier run."""

    def get(self, index: int) -> bytes:
        """Return a line."""
        return self._lines[index]

    def drop(self, index: int) -> None:
        """Remove a line after it is written."""
        del self._lines[index]

    def rest(self) -> Iterator[bytes]:
        """Yield all waiting lines in input order."""
        yield from (self._lines[index] for index in sorted(self._lines))

    def sync(self) -> None:
        """Do nothing: memory does not survive a power failure."""

    def remove(self) -> None:
        """Remove all lines."""
        self._lines.clear()

    def close(self) -> None:
        """Do nothing."""


class Spill:
    """Finished lines ahead of their turn, on disk in the file `path`; only their positions are in memory.

        >>> spill = Spill(Path("answers.pending.jsonl")); spill.add(7, b"{}\\n"); spill.get(7); spill.drop(7)

    The file exists only while it is needed. A line is dropped after it is written to the output; a run killed in
    between leaves it in both, and the reader skips lines that the output has. All methods raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: LineFile | None = LineFile(path) if path.exists() else None
        self._waiting: dict[int, SpillPosition] = {}
        # lines of an earlier run by fingerprint, whose index is not known yet
        self._unclaimed: dict[str, SpillPosition] = {}
        self._live = 0  # bytes of waiting and unclaimed lines

    @property
    def size(self) -> int:
        """Return the file's size in bytes."""
        return self._file.size if self._file else 0

    def __contains__(self, index: int) -> bool:
        return index in self._waiting

    def lines(self) -> Iterator[tuple[SpillPosition, bytes]]:
        """Yield the complete lines of an earlier run with their positions."""
        if self._file:
            self._file.cut_torn_line()
            for begin, line in self._file:
                yield SpillPosition(begin, len(line)), line

    def keep(self, found: dict[str, SpillPosition]) -> None:
        """Keep only these lines of an earlier run, by fingerprint."""
        self._unclaimed = found
        self._live = sum(place.length for place in found.values())
        if self._live != self.size:
            self._rewrite()

    def add(self, index: int, line: bytes) -> None:
        """Write line number `index`, which waits for its turn."""
        if self._file is None:
            self._file = LineFile(self.path)
        elif self._file.size > 2 * self._live + SLACK:
            self._rewrite()
        self._waiting[index] = SpillPosition(self._file.append(line), len(line))
        self._live += len(line)

    def claim(self, index: int, key: str) -> None:
        """Assign an earlier run's line with this fingerprint to `index`, if there is one."""
        if (place := self._unclaimed.pop(key, None)) is not None:
            self._waiting[index] = place

    def get(self, index: int) -> bytes:
        """Return a line."""
        return self._read(self._waiting[index])

    def drop(self, index: int) -> None:
        """Remove a line after it is written to the output."""
        self._live -= self._waiting.pop(index).length
        if not self._live and self._file:
            self._file.empty()

    def rest(self) -> Iterator[bytes]:
        """Yield all waiting lines in input order, then the unclaimed ones."""
        for place in [self._waiting[index] for index in sorted(self._waiting)] + list(self._unclaimed.values()):
            yield self._read(place)

    def set_aside(self, number: int) -> None:
        """Rename the file of an earlier run to NAME.number."""
        if self._file and self._file.size:
            self._file.move_aside(number)

    def copy_aside(self, number: int) -> None:
        """Copy the file of an earlier run to NAME.number."""
        shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.{number}"))

    def sync(self) -> None:
        """Make waiting lines survive a power failure."""
        if self._file:
            self._file.sync()

    def remove(self) -> None:
        """Delete the file: all lines are in the output."""
        self._waiting, self._unclaimed, self._live = {}, {}, 0
        if self._file:
            self._file.remove()
            self._file = None

    def close(self) -> None:
        """Close the file, and delete it if empty."""
        if self._file:
            self._file.close_or_remove()

    def _read(self, place: SpillPosition) -> bytes:
        assert self._file is not None
        return self._file.read(*place)

    def _rewrite(self) -> None:
        """Rewrite the file without dropped lines."""
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


# -- local output ----------------------------------------------------------------------------------


class Appended(LineFile):
    """A store in one local file, appended line by line.

    >>> store = Appended(Path("answers.jsonl")); store.append(b"{}\\n"); store.finish()
    """

    @property
    def begun(self) -> bool:
        """Return whether there are lines."""
        return self.size > 0

    def finished(self, drop: Drop | None = None) -> Iterator[Finished]:
        """Remove a partial last line and the lines to `drop`, and yield what the others finish."""
        self.cut_torn_line()
        if drop is not None:
            self.replace(line for _, line in self if not drop(Finished.of(line)))
        return (Finished.of(line) for _, line in self)

    def rewrite(self, change: Change, more: Iterable[bytes]) -> None:
        """Replace all lines at once by what `change` makes of them, and `more`."""
        self.replace(chain((new for _, line in self if (new := change(line)) is not None), more))

    def set_aside(self, spill: Spill | None) -> None:
        """Rename what is not resumed to NAME.1, NAME.2, ...; written lines are never lost."""
        number = free_number(self.path, *([spill.path] if spill else []))
        if spill:
            spill.set_aside(number)
        if self.size:
            self.move_aside(number)

    def finish(self) -> None:
        """Do nothing: appended lines are complete."""


def free_number(*paths: Path) -> int:
    """Return the smallest n for which no NAME.n exists."""
    return next(n for n in count(1) if not any(path.with_name(f"{path.name}.{n}").exists() for path in paths))
