"""An output that is one local file, appended line by line.

>>> store = Appended(Path("answers.jsonl")); store.append(b"{}\\n"); store.finish()
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

from ragspec.outputs.ledger import Drop, Finished
from ragspec.outputs.linefile import LineFile
from ragspec.outputs.spill import Spill


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
