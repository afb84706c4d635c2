"""Places: the rows of the cache, and what each of them offers to requests that begin alike."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from ragspec.engine.prefix import shared
from ragspec.engine.row import Row


class Place:
    """A row of the cache, and whose keys and values it holds: those of the row under way, or of the last one."""

    __slots__ = ("group", "left", "left_base", "row")

    def __init__(self) -> None:
        self.row: Row | None = None
        self.left = array("i")
        self.left_base = 0
        self.group = -1

    @property
    def base(self) -> int:
        """Tokens that the row there began with, or the last one (Row.base)."""
        return self.row.base if self.row else self.left_base

    def leave(self) -> None:
        """Free the place; what its row computed stays until another row needs the place."""
        assert self.row is not None
        self.left, self.left_base = array("i", self.row.tokens[: self.row.computed]), self.row.base
        self.row = None

    def offers(self, tokens: array[int]) -> tuple[int, int]:
        """Return how many of `tokens` it holds now, and how many it will."""
        if self.row is None:
            held = shared(tokens, self.left)
            return held, held
        coming = shared(tokens, array("i", self.row.tokens))
        return min(coming, self.row.computed), coming


@dataclass(frozen=True, slots=True)
class Start:
    """`row` begins at its place with the first `tokens` tokens of place `donor`, which may be its own."""

    row: Row
    donor: int
    tokens: int
