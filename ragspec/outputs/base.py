"""What an output is: a sink for finished lines, and a store if a later run can resume it.

A new kind of output needs one module in this folder and a branch in target.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from ragspec.json_text import loads
from ragspec.outputs.ledger import Drop, Finished

if TYPE_CHECKING:
    from ragspec.outputs.line_file import Spill


Change = Callable[[bytes], bytes | None]  # returns what takes a line's place, None to remove it


class Sink(Protocol):
    """Takes lines in the requested order (journal.py). A line is finished once `append` returns."""

    def append(self, line: bytes) -> Any:
        """Write one line, including its end. On OSError, nothing of the line is written."""

    def sync(self) -> None:
        """Make written lines survive a power failure."""

    def close(self) -> None:
        """Close the sink."""


class Store(Sink, Protocol):
    """A sink that keeps its lines, so that a later run can resume. Every method raises OSError."""

    @property
    def begun(self) -> bool:
        """Return whether there are lines."""

    def finished(self, drop: Drop | None = None) -> Iterator[Finished]:
        """Repair what a killed run left, remove the lines to `drop`, and yield what the others finish."""

    def rewrite(self, change: Change, more: Iterable[bytes]) -> None:
        """Give each line, in the order of `finished`, to `change`, and append `more`.

        A run killed meanwhile leaves each line either as it was or as it is to be, and never both.
        """

    def set_aside(self, spill: Spill | None) -> None:
        """Rename all lines, and those waiting in `spill`, and start empty."""

    def finish(self) -> None:
        """Complete the output: all lines of this run are written."""


class Document(Protocol):
    """A small JSON file beside an output."""

    @property
    def name(self) -> str:
        """Return the name for messages."""

    def read(self) -> dict[str, Any]:
        """Return the content, {} without a file."""

    def write(self, value: Any) -> None:
        """Write the content atomically, readable only by its owner. Raises OSError."""


class MemorySink:
    """A sink in memory, for programs that iterate over answers."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()

    def append(self, line: bytes) -> None:
        """Store a line."""
        self._lines.append(line)

    def take(self) -> list[dict[str, Any]]:
        """Return the parsed lines since the last call."""
        taken = [loads(line) for line in self._lines]
        self._lines.clear()
        return taken

    def sync(self) -> None:
        """Do nothing: memory does not survive."""

    def close(self) -> None:
        """Do nothing; lines not yet taken stay."""
