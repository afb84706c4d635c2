"""An output in memory, for programs that iterate over answers."""

from __future__ import annotations

from collections import deque
from typing import Any

from ragspec.json_text import loads


class MemorySink:
    """Keeps lines until they are taken."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()

    def append(self, line: bytes) -> None:
        """Keep a line."""
        self._lines.append(line)

    def take(self) -> list[dict[str, Any]]:
        """Return the lines since the last call, as what they say."""
        taken = [loads(line) for line in self._lines]
        self._lines.clear()
        return taken

    def sync(self) -> None:
        """Nothing of it survives."""

    def close(self) -> None:
        """Keep what was not taken."""
