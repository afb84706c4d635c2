"""The drafter protocol: a drafter sees token ids and guesses the next ones. It may be wrong; it can never change an
answer.

    >>> row = PromptLookup().open([5, 6, 7, 5, 6])
    >>> row.propose(3).token_ids
    [7, 5, 6]

Standard library only, so that any engine can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class Draft:
    """A chain of guessed tokens.

    Only `token_ids` is required. An empty draft means that the drafter has no guess.

    Attributes:
        token_ids: The guesses, in order. Length k, at most the `limit` of `propose`.
        cumulative_acceptance: Length k, or empty. `cumulative_acceptance[j]` is the probability that tokens 0 to j are
            all right, from 0 to 1; it never rises. If a drafter from outside leaves it empty, it is measured from that
            drafter's earlier drafts; a drafter in ragspec has to give it (calibration.py), or `num_tokens: auto` never
            verifies its guesses.
        sources: Length k, or empty. `sources[j]` is the position in the record's own prompt that token j was copied
            from, or None. Answers cite passages by it (`copied`).
        probabilities: Tensor of shape (k, vocabulary) from which a draft model sampled its tokens; None if they were
            not sampled.
        survival: The name that `cumulative_acceptance` had before 0.3, still accepted.
    """

    token_ids: list[int] = field(default_factory=list)
    cumulative_acceptance: list[float] = field(default_factory=list)
    sources: list[int | None] = field(default_factory=list)
    probabilities: Any = None
    survival: InitVar[Sequence[float] | None] = None

    def __post_init__(self, survival: Sequence[float] | None) -> None:
        if survival is not None:
            self.cumulative_acceptance = list(survival)

    def cut(self, length: int) -> Draft:
        """Shorten the chain.

        Args:
            length: Number of tokens to keep.

        Returns:
            A draft of the first `length` tokens; the same draft if it has no more.
        """
        if length >= len(self.token_ids):
            return self
        probabilities = None if self.probabilities is None else self.probabilities[:length]
        acceptance = self.cumulative_acceptance[:length]
        return Draft(self.token_ids[:length], acceptance, self.sources[:length], probabilities)


class RowDrafter(Protocol):
    """Drafts for one record. `extend` is called after each step of the model, `propose` before some of them."""

    def propose(self, limit: int) -> Draft:
        """Guess the tokens that follow what this drafter has seen.

        Args:
            limit: Largest number of tokens to guess. Any beyond it are ignored.

        Returns:
            The guesses; an empty `Draft` if there are none.
        """

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that the target model wrote, right after each step.

        Args:
            token_ids: The new tokens: those of the draft that were accepted, and the model's own next one.
        """

    def close(self) -> None:
        """Release what the record holds: its answer is finished."""


class Drafter(Protocol):
    """Opens a `RowDrafter` for each record.

    Several records are open at once. What a drafter keeps between records may only make its guesses better.
    """

    def open(self, prompt: Sequence[int], passages: Sequence[tuple[int, int]] = ()) -> RowDrafter:
        """Start drafting for a record.

        Args:
            prompt: Token ids of the whole prompt.
            passages: (start, end) token positions of the retrieved passages in `prompt`, end excluded; empty if they
                are not known.

        Returns:
            The drafter of this record.
        """


class BatchDrafter(Drafter, Protocol):
    """A drafter that drafts for several records in one call.

    It may also have `settle()`: work that it has put off because the next drafts do not need it. It is called while the
    model computes.
    """

    def propose_all(self, rows: Sequence[Any], limits: Sequence[int]) -> Sequence[Draft]:
        """Return what each row would propose.

        Args:
            rows: What `open` returned, each at most once.
            limits: Per row, the largest number of tokens to guess.
        """


def propose_all(drafter: Drafter, rows: Sequence[RowDrafter], limits: Sequence[int]) -> Sequence[Draft]:
    """Return the drafts of several rows of a drafter, in one call if it is a BatchDrafter."""
    together = getattr(drafter, "propose_all", None)
    if together is None:
        return [row.propose(limit) for row, limit in zip(rows, limits, strict=True)]
    drafts: Sequence[Draft] = together(rows, limits)
    return drafts


def settle(drafter: Any) -> None:
    """Let a drafter do what it has put off, if it puts anything off."""
    do = getattr(drafter, "settle", None)
    if do is not None:
        do()


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
