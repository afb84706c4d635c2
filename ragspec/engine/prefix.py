"""Shared prefixes: the order that brings records of one prefix together. Pure; the engine does the copying.

Source of the idea: BatchLLM, arXiv:2412.03594. Limit: sharing is found only among records read ahead together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
