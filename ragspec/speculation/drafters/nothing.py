"""No guesses of its own: what a record's grammar forces is drafted all the same, with every drafter.

speculation: {method: grammar}
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.speculation.drafters.base import Draft


class Nothing:
    """Drafts nothing."""

    def open(self, prompt: Sequence[int], passages: Sequence[tuple[int, int]] = ()) -> NoGuesses:
        """Return the drafter of one record."""
        return NoGuesses()


class NoGuesses:
    """Nothing, for one record."""

    def propose(self, limit: int) -> Draft:
        """Return an empty draft."""
        return Draft()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Learn nothing."""

    def close(self) -> None:
        """Keep nothing."""
