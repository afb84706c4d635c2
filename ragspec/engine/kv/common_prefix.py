"""What token sequences have in common from their start, and which prompts to bring together for it. Pure.

    >>> shared([1, 2, 3], [1, 2, 4]), grouped([[1] * 40, [2] * 40, [1] * 40 + [3]])
    (2, [[0, 2], [1]])

Source of grouping by prefix: BatchLLM, arXiv:2412.03594; it only sees records that are read ahead together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

LEAST = 64  # tokens from which a shared prefix is worth a split of its own in attention
PIECE = 16  # tokens from one key of a text to the next
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


def keys_of(tokens: Sequence[int]) -> list[int]:
    """Return keys of what a text begins with: its first 1, 2, 4, 8 and 16 tokens, and each further PIECE tokens."""
    keys: list[int] = []
    key = start = 0
    while (end := _length(len(keys) + 1)) <= len(tokens):
        key, start = hash((key, *tokens[start:end])), end
        keys.append(key)
    return keys


def _length(keys: int) -> int:
    """Return how many tokens the last of so many keys stands for."""
    shorter = PIECE.bit_length() - 1
    return 1 << keys - 1 if 0 < keys <= shorter else PIECE * max(0, keys - shorter)


class PrefixIndex:
    """Slots by what their texts begin with."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[int, None]] = {}  # by key, the earliest first
        self._keys: dict[int, list[int]] = {}  # by slot

    def put(self, slot: int, keys: list[int]) -> None:
        """Take in the text of a slot, in place of an earlier one."""
        for key in self._keys.get(slot, ()):
            slots = self._slots[key]
            del slots[slot]
            if not slots:
                del self._slots[key]
        self._keys[slot] = keys
        for key in keys:
            self._slots.setdefault(key, {})[slot] = None

    def nearest(self, keys: Sequence[int]) -> tuple[Collection[int], int]:
        """Return the slots whose texts begin most like one with these keys, and how many tokens they share at least.

        They differ by less than PIECE tokens in what they share.
        """
        found: Collection[int] = ()
        for count, key in enumerate(keys):
            slots = self._slots.get(key)
            if slots is None:
                return found, _length(count)
            found = slots
        return found, _length(len(keys))
