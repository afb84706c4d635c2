"""What a drafter is: it sees token ids and guesses the next ones. It may be wrong; it can never change an answer.

    >>> row = PromptLookup().open([5, 6, 7, 5, 6])
    >>> row.propose(3).token_ids
    [7, 5, 6]

Standard library only, so that any engine can serve it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class Draft:
    """A chain of guessed tokens.

    survival[j]: the probability that tokens 0 to j are all right; it never rises. sources[j]: the position in the
    row's own prompt that token j was copied from, or None. probabilities: (tokens, vocab), what a draft model
    sampled its tokens from; None where they were not sampled.
    """

    token_ids: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    sources: list[int | None] = field(default_factory=list)
    probabilities: Any = None

    def cut(self, length: int) -> Draft:
        """Return the first `length` tokens of the chain."""
        if length >= len(self.token_ids):
            return self
        probabilities = None if self.probabilities is None else self.probabilities[:length]
        return Draft(self.token_ids[:length], self.survival[:length], self.sources[:length], probabilities)


class RowDrafter(Protocol):
    """Drafts for one record."""

    def propose(self, limit: int) -> Draft:
        """Return up to `limit` guesses for the tokens that follow what this row has seen."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in what the target really wrote, right after each step."""

    def close(self) -> None:
        """The answer is finished."""


class Drafter(Protocol):
    """Opens a RowDrafter for each record. What it keeps between records may only make guesses better."""

    def open(self, prompt: Sequence[int], passages: Sequence[tuple[int, int]] = ()) -> RowDrafter:
        """prompt: token ids. passages: (start, end) positions in it of the retrieved passages, where known."""


# -- no guesses of its own: what a record's grammar forces is drafted all the same, with every drafter ----------------
#
# speculation: {method: grammar}


class NoDrafter:
    """Drafts nothing."""

    def open(self, prompt: Sequence[int], passages: Sequence[tuple[int, int]] = ()) -> NoRowDrafter:
        """Return the drafter of one record."""
        return NoRowDrafter()


class NoRowDrafter:
    """Nothing, for one record."""

    def propose(self, limit: int) -> Draft:
        """Return an empty draft."""
        return Draft()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Learn nothing."""

    def close(self) -> None:
        """Keep nothing."""
