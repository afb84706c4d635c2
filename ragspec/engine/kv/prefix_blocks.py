"""Shared prefixes: which row holds the slots of which other rows, and which prompts to bring together. Pure.

    >>> blocks = PrefixBlocks()
    >>> blocks.share_prefix(0, 1, 100)  # row 1 starts with the first 100 tokens of row 0
    >>> blocks.parts(1, 0, 120)
    [(0, 0, 100), (1, 100, 120)]

An entry always names the row that holds the slots, so chains of sharing do not grow. Limit: a slot is shared at its own
position, since keys and values depend on it. Source of grouping by prefix: BatchLLM, arXiv:2412.03594; it only sees
records that are read ahead together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

LEAST = 64  # tokens from which a shared prefix is worth a split of its own in attention

Part = tuple[int, int, int]  # row that holds the slots, first slot, end slot


class PrefixBlocks:
    """The slots that each row takes from others: contiguous parts from its first slot on."""

    def __init__(self) -> None:
        self._of: dict[int, list[Part]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the rows that share another row's slots."""
        return iter(list(self._of))

    def end(self, row: int) -> int:
        """Return how many leading slots a row does not hold itself."""
        parts = self._of.get(row)
        return parts[-1][2] if parts else 0

    def parts(self, row: int, first: int, last: int) -> list[Part]:
        """Return which rows hold a row's slots."""
        found = _within(self._of.get(row, ()), first, last)
        own = max(first, self.end(row))
        return [*found, (row, own, last)] if own < last else found

    def share_prefix(self, donor: int, row: int, tokens: int) -> None:
        """Start a row with the first tokens of another, or with its own, replacing what it shared before."""
        self._set(row, self.parts(donor, 0, tokens))

    def shorten(self, row: int, tokens: int) -> None:
        """Share no more than a row's first tokens."""
        self._set(row, _within(self._of.get(row, ()), 0, tokens))

    def held(self) -> dict[int, int]:
        """Return, for each row whose slots others share, the end of those slots."""
        ends: dict[int, int] = {}
        for row, parts in self._of.items():
            for holder, _, end in parts:
                if holder != row:
                    ends[holder] = max(end, ends.get(holder, 0))
        return ends

    def from_row(self, holder: int, first: int, last: int) -> dict[int, list[Part]]:
        """Return, for each other row, the parts of these slots that it shares."""
        found = {}
        for row, parts in self._of.items():
            mine = [part for part in _within(parts, first, last) if part[0] == holder]
            if mine and row != holder:
                found[row] = mine
        return found

    def move(self, part: Part, to: int) -> None:
        """Make `to` the holder of the slots in `part`, for all rows that share them."""
        holder, first, last = part
        for row in list(self._of):
            parts: list[Part] = []
            for other, begin, end in self._of[row]:
                if other != holder or end <= first or last <= begin:
                    parts.append((other, begin, end))
                    continue
                cuts = [begin, *(at for at in (first, last) if begin < at < end), end]
                for at, until in pairwise(cuts):
                    parts.append((to if first <= at < last else other, at, until))
            self._set(row, parts)

    def _set(self, row: int, parts: Iterable[Part]) -> None:
        """Set a row's parts, merged; a last part that it holds itself is dropped."""
        kept: list[Part] = []
        for holder, first, last in parts:
            if kept and kept[-1][0] == holder:
                kept[-1] = (holder, kept[-1][1], last)
            else:
                kept.append((holder, first, last))
        if kept and kept[-1][0] == row:
            kept.pop()
        self._of.pop(row, None)
        if kept:
            self._of[row] = kept


def _within(parts: Iterable[Part], first: int, last: int) -> list[Part]:
    cut = ((holder, max(begin, first), min(end, last)) for holder, begin, end in parts)
    return [part for part in cut if part[1] < part[2]]


# -- grouping --------------------------------------------------------------------------------------
WORTH = 32  # shared tokens, beyond those that all prompts share, from which prompts are grouped


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix. Both arguments are lists, or both arrays."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def grouped(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the indices of `prompts` in groups with a common prefix, otherwise in the order given.

    A group is in lexicographic order, so that longer common prefixes are adjacent too.
    """
    ranked = sorted(range(len(prompts)), key=lambda i: prompts[i])  # type: ignore[arg-type, return-value]
    if len(ranked) < 2:
        return [ranked] if ranked else []
    # what all of them share (a system prompt) is in every cache row anyway
    common = shared(prompts[ranked[0]], prompts[ranked[-1]]) if len(ranked) > 2 else 0
    groups = [[ranked[0]]]
    for before, index in pairwise(ranked):
        if shared(prompts[before], prompts[index]) >= common + WORTH:
            groups[-1].append(index)
        else:
            groups.append([index])
    groups.sort(key=min)
    return groups


def largest_first(groups: list[list[int]], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the groups by saving, largest first: the common prefix, for all but one of a group."""

    def saved(group: list[int]) -> int:
        return shared(prompts[group[0]], prompts[group[-1]]) * (len(group) - 1)

    return sorted(groups, key=saved, reverse=True)
