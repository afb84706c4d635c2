"""What an output is: a sink for finished lines. A new kind of output is one new file in this folder."""

from __future__ import annotations

from typing import Any, Protocol


class Sink(Protocol):
    """Takes lines in the order in which they are asked for (journal.py). A line is finished once `append` returns."""

    def append(self, line: bytes) -> Any:
        """Write one line, its end included. Raises OSError, nothing of the line written."""

    def sync(self) -> None:
        """Make what was written survive a power cut."""

    def close(self) -> None:
        """End it."""
