"""Notes for the user about a run."""

from __future__ import annotations


class Notes(list[str]):
    """A list of sentences without duplicates."""

    def add(self, text: str) -> None:
        """Append `text` unless it is there already."""
        if text not in self:
            self.append(text)
