"""Finished lines that are ahead of their turn: on disk at once; only their places are in memory.

    >>> spill = Spill(Path("answers.pending.jsonl")); spill.add(7, b"{}\\n"); spill.get(7); spill.drop(7)

A line is dropped once it is in the output. Being killed between the two leaves it in both; whoever reads the file again
leaves out what the output has.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ragspec.outputs.linefile import LineFile

SLACK = 16 << 20  # bytes of dropped lines, beyond as much as still waits, from which on the file is rewritten


class Place(NamedTuple):
    """Where a line is."""

    begin: int
    length: int


class Shelf:
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
        self._waiting: dict[int, Place] = {}
        self._unclaimed: dict[str, Place] = {}  # lines of an earlier run, by fingerprint, whose turn is not known yet
        self._live = 0  # bytes of both

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size if self._file else 0

    def __contains__(self, index: int) -> bool:
        return index in self._waiting

    def lines(self) -> Iterator[tuple[Place, bytes]]:
        """Yield the whole lines that an earlier run left, and where they are."""
        if self._file:
            self._file.cut_torn_line()
            for begin, line in self._file:
                yield Place(begin, len(line)), line

    def keep(self, found: dict[str, Place]) -> None:
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
        self._waiting[index] = Place(self._file.append(line), len(line))
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

    def _read(self, place: Place) -> bytes:
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
            moved.append(Place(begin, place.length))
            begin += place.length
        self._waiting = dict(zip(waiting, moved, strict=False))
        self._unclaimed = dict(zip(unclaimed, moved[len(waiting) :], strict=True))
