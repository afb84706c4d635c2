"""Who holds what a row begins with, so that tokens that rows share are in memory once. Pure: the cache copies.

    >>> loans = PrefixBlocks()
    >>> loans.lend(0, 1, 100)  # row 1 begins with the first 100 tokens of row 0
    >>> loans.parts(1, 0, 120)
    [(0, 0, 100), (1, 100, 120)]

A loan always names the row in whose slots the tokens are, so loans of loans do not add up.
Limit: a slot is borrowed at its own position, for keys and values depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

LEAST = 64  # tokens that are worth a piece of their own to attention

Part = tuple[int, int, int]  # the row that holds it, first and last slot


class PrefixBlocks:
    """What each row borrows: parts one after the other, from its first slot on."""

    def __init__(self) -> None:
        self._of: dict[int, list[Part]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[int]:
        """The rows that borrow."""
        return iter(list(self._of))

    def end(self, row: int) -> int:
        """Return how many slots, from its first on, the row itself need not hold."""
        parts = self._of.get(row)
        return parts[-1][2] if parts else 0

    def parts(self, row: int, first: int, last: int) -> list[Part]:
        """Return who holds a row's slots."""
        found = _within(self._of.get(row, ()), first, last)
        own = max(first, self.end(row))
        return [*found, (row, own, last)] if own < last else found

    def share_prefix(self, donor: int, row: int, tokens: int) -> None:
        """Let a row begin with the first tokens of another, or with its own, whatever it borrowed before."""
        self._set(row, self.parts(donor, 0, tokens))

    def shorten(self, row: int, tokens: int) -> None:
        """Let a row borrow no more than its first tokens."""
        self._set(row, _within(self._of.get(row, ()), 0, tokens))

    def held(self) -> dict[int, int]:
        """Return, for each row that others borrow from, up to which slot."""
        ends: dict[int, int] = {}
        for row, parts in self._of.items():
            for holder, _, end in parts:
                if holder != row:
                    ends[holder] = max(end, ends.get(holder, 0))
        return ends

    def from_row(self, holder: int, first: int, last: int) -> dict[int, list[Part]]:
        """Return, for each other row, what it borrows of these slots."""
        found = {}
        for row, parts in self._of.items():
            mine = [part for part in _within(parts, first, last) if part[0] == holder]
            if mine and row != holder:
                found[row] = mine
        return found

    def move(self, part: Part, to: int) -> None:
        """Say that `to` holds from now on what `part` names, for all who borrow it."""
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
        """Keep a row's parts, as few as there can be; what it holds itself at the end is no loan."""
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


# -- shared prefixes: the order that brings records of one prefix together. Pure; the engine does the copying
#
# Source of the idea: BatchLLM, arXiv:2412.03594. Limit: sharing is found only among records read ahead together.


WORTH = 32  # tokens shared, beyond what all share, that make it worth bringing records together


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix. Both must slice alike (two lists, or two arrays)."""
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
    """Return the indices of `prompts` in groups that share a prefix, otherwise in the order given.

    Inside a group the order is lexicographic, so that longer shared prefixes are neighbours too.
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
    """Return the groups that save the most computing first: what a group shares, for all but one of it."""

    def saved(group: list[int]) -> int:
        return shared(prompts[group[0]], prompts[group[-1]]) * (len(group) - 1)

    return sorted(groups, key=saved, reverse=True)
