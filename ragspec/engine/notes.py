"""What the user should be told about a run."""

from __future__ import annotations


class Notes(list[str]):
    """Sentences, each of them once."""

    def add(self, text: str) -> None:
        """Say `text`, unless it has been said."""
        if text not in self:
            self.append(text)
