"""The drafter protocol: guess the next token ids from those seen. A wrong guess costs time and never changes an answer.

    >>> row = PromptLookup().open([5, 6, 7, 5, 6])
    >>> row.propose(3).token_ids
    [7, 5, 6]

Standard library only, so that any engine can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class Draft:
    """A chain of guessed tokens.

    Attributes:
        token_ids: the guesses.
        survival: at [j], the probability that tokens 0 to j are all right; never rises.
        sources: at [j], the position in the row's own prompt that token j was copied from, or None.
        probabilities: (tokens, vocab), the distributions that a draft model sampled from; None if not sampled.
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
        """Return up to `limit` guesses for the tokens that follow those seen."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the tokens that the target emitted. Called after each step."""

    def close(self) -> None:
        """Finish: the answer is complete."""


class Drafter(Protocol):
    """Opens a RowDrafter per record. State kept between records may only affect the quality of guesses."""

    def open(self, prompt: Sequence[int], passages: Sequence[tuple[int, int]] = ()) -> RowDrafter:
        """Return the drafter of one record. prompt: token ids. passages: (start, end) of each in it, if known."""


# -- no drafts -------------------------------------------------------------------------------------


class NoDrafter:
    """Drafts nothing itself (method `grammar`). What a record's grammar forces is drafted with every drafter."""

    def open(self, prompt: Sequence[int], passages: Sequence[tuple[int, int]] = ()) -> NoRowDrafter:
        """Return the drafter of one record."""
        return NoRowDrafter()


class NoRowDrafter:
    """Empty drafts for one record."""

    def propose(self, limit: int) -> Draft:
        """Return an empty draft."""
        return Draft()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
