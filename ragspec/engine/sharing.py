"""Which rows of a step hold the same first tokens, so that they may attend to them together (pieces.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragspec.engine.loans import LEAST
from ragspec.engine.pieces import Together
from ragspec.engine.prefix import shared
from ragspec.engine.row import Row

REMEMBERED = 1 << 14  # pairs of requests


class Sharing:
    """Finds the rows of a step that hold the same first tokens, by their prompts.

    agree: whether the tokens of two rows may be shared (Frequencies.agree).
    """

    def __init__(self, agree: Callable[[int, int, int], bool]) -> None:
        self._agree = agree
        self._common: dict[tuple[int, int], int] = {}  # by the indices of two requests

    def among(self, rows: Sequence[Row]) -> list[Together]:
        """Return groups of rows; no row is in two of them."""
        alike: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            alike.setdefault(tuple(row.request.token_ids[:LEAST]), []).append(row)
        return [group for some in alike.values() if len(some) > 1 for group in self._groups(some)]

    def read(self, rows: Sequence[Row]) -> float:
        """Return the share of the rows' tokens that a step reads which reads once what they have in common."""
        common = sum(sum(group.tokens.values()) for group in self.among(rows))
        return 1 - common / max(1, sum(len(row.tokens) for row in rows))

    def _groups(self, rows: Sequence[Row]) -> list[Together]:
        groups = []
        while len(rows) > 1:
            leader, others = rows[0], rows[1:]
            tokens = {row.place: self._shared(leader, row) for row in others}
            found = {place: count for place, count in tokens.items() if count >= LEAST}
            if found:
                groups.append(Together(leader.place, found))
            rows = [row for row in others if row.place not in found]
        return groups

    def _shared(self, one: Row, other: Row) -> int:
        pair = one.request.index, other.request.index
        if pair not in self._common:
            if len(self._common) >= REMEMBERED:
                self._common.clear()
            self._common[pair] = shared(one.request.token_ids, other.request.token_ids)
        tokens = min(self._common[pair], one.computed, other.computed)
        return tokens if self._agree(one.base, other.base, tokens) else 0
