"""What an output is: a sink for finished lines, and what a run that goes on later needs of it.

A new kind of output is one new file in this folder, and a line in referee.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from ragspec.json_text import loads
from ragspec.outputs.ledger import Drop, Finished

if TYPE_CHECKING:
    from ragspec.outputs.line_file import Spill


class Sink(Protocol):
    """Takes lines in the order in which they are asked for (journal.py). A line is finished once `append` returns."""

    def append(self, line: bytes) -> Any:
        """Write one line, its end included. Raises OSError, nothing of the line written."""

    def sync(self) -> None:
        """Make what was written survive a power cut."""

    def close(self) -> None:
        """End it."""


class Store(Sink, Protocol):
    """A sink that keeps its lines, so that a later run can go on with it. Every method raises OSError."""

    @property
    def begun(self) -> bool:
        """Whether it has lines."""

    def finished(self, drop: Drop | None = None) -> Iterator[Finished]:
        """Make it whole after a run that was killed, and yield what its lines finish, those to `drop` left out."""

    def set_aside(self, spill: Spill | None) -> None:
        """Move all lines, and those that wait for their turn in `spill`, to another name, and begin anew."""

    def finish(self) -> None:
        """All lines of this run are there: make them the output."""


class Document(Protocol):
    """A small JSON file beside the lines of an output."""

    @property
    def name(self) -> str:
        """How messages call it."""

    def read(self) -> dict[str, Any]:
        """Return what it says; nothing where there is none."""

    def write(self, value: Any) -> None:
        """Write it whole or not at all, for its owner's eyes. Raises OSError."""


# -- an output in memory, for programs that iterate over answers ------------------------------------------------------


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
