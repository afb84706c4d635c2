"""How much of some files has been read so far, seen from outside: of weights, which libraries map into memory.

    >>> reading = Reading([Path("model.safetensors")]); reading.done
    0

A library may say that all weights are loaded when it has only mapped them; what a process has touched of a mapped file
is in Linux's /proc. Processes that this one started count too. Limit: 0 on other systems, and for files that are read
without being mapped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

BEGUN = 0.05  # of a file: less may be no more than its header


class Reading:
    """Files that are being read. total: their bytes. Raises OSError for files that are not there."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._sizes = {file: os.path.getsize(file) for file in map(os.path.realpath, files)}
        self._most = dict.fromkeys(self._sizes, 0)
        self.total = sum(self._sizes.values())

    @property
    def done(self) -> int:
        """Return the bytes read so far."""
        open_now = set()
        for process in _processes():
            for file, resident in _mapped(process).items():
                if file in self._most:
                    open_now.add(file)
                    self._most[file] = min(self._sizes[file], max(self._most[file], resident))
        for file, most in self._most.items():
            if file not in open_now and most > BEGUN * self._sizes[file]:
                self._most[file] = self._sizes[file]  # closed again, so it has been read
        return sum(self._most.values())


def _processes() -> Iterator[int]:
    """Yield this process and its descendants."""
    found = [os.getpid()]
    while found:
        process = found.pop()
        yield process
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    found += map(int, file.read().split())


def _mapped(process: int) -> dict[str, int]:
    """Return how many bytes of each file that a process has mapped are in its memory."""
    found: dict[str, int] = {}
    with suppress(OSError), open(f"/proc/{process}/smaps", errors="replace") as lines:
        file = ""
        for line in lines:
            if line.startswith("Rss:"):
                found[file] = found.get(file, 0) + int(line.split()[1]) * 1024
            elif "-" in line.partition(" ")[0]:  # a mapping's addresses; its file comes last
                file = f"/{line.partition('/')[2].rstrip()}"
    return found
