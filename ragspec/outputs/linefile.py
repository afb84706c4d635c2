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
from pathlib import Path
from typing import IO, Any

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


def sync_folder(folder: Path) -> None:
    """Let the names in a folder survive a power cut, as far as its file system supports that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
