"""The passages of several records, by number: those with one title and text are one.

>>> passages = Numbered(); records = [passages.of(record) for record in window]
>>> plan = shared_order(records, passages.weights)
>>> passages.arranged(window[0], records[0], plan.orders[0])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from ragspec.prompts.builder import rank
from ragspec.records import Passage, Record, Tokenizer

SAMPLE = 64  # passages whose tokens are counted, to tell tokens from characters


class PassageNumbers:
    """weights: characters of each passage."""

    def __init__(self) -> None:
        self.weights: dict[int, int] = {}
        self._numbers: dict[tuple[str | None, str, int], int] = {}

    def of(self, record: Record, most: int | None = None) -> list[int]:
        """Return a record's passages, in its order; a repeated one counts as another. most: only so many, the best."""
        times: dict[tuple[str | None, str], int] = {}
        return [self._number(record.contexts[place], times) for place in kept_places(record, most)]

    def _number(self, passage: Passage, times: dict[tuple[str | None, str], int]) -> int:
        key = (passage.title, passage.text)
        times[key] = times.get(key, 0) + 1
        number = self._numbers.setdefault((*key, times[key]), len(self._numbers))
        self.weights[number] = len(passage.text) + len(passage.title or "")
        return number

    @staticmethod
    def arranged(record: Record, passages: list[int], order: list[int]) -> Record:
        """Return a record with those of its passages in this order."""
        places = dict(zip(passages, kept_places(record, len(passages)), strict=True))
        return replace(record, order=tuple(places[passage] for passage in order))

    def tokens_per_character(self, tokenizer: Tokenizer) -> float:
        """Return roughly how many tokens a character of these passages makes."""
        texts = [text for _, text, _ in list(self._numbers)[:SAMPLE]]
        tokens = sum(len(tokenizer.encode(text, special_tokens=False)) for text in texts)
        return tokens / max(1, sum(map(len, texts)))


def kept_places(record: Record, most: int | None) -> list[int]:
    """Return the places of a record's best passages, `most` at most, in its order."""
    return sorted(rank(record.contexts)[:most])


# -- the order of passages by which many records compute fewest tokens: those that begin alike share what they --------
#
#     >>> plan = shared_order([[7, 3], [3, 9]], {3: 100, 7: 50, 9: 80})
#     >>> plan.orders, plan.computed, plan.by_rank
#     ([[3, 7], [3, 9]], 230, 330)
#
# A greedy trie: of the passages that a group of records has in common, the one that saves the most tokens goes first
# for all who have it, and so on within them and among the others. Pure; the costs are those of a cache that forgets
# nothing. It need not be the best of all orders; it took 0.67 of the tokens where the order by rank took 0.87, on 500
# questions about one corpus.


Passages = Sequence[int]  # of a record, each by its number, none twice, as they come


@dataclass(frozen=True, slots=True)
class PassagePlan:
    """orders: each record's passages as they are to stand. sequence: the records, those that begin alike together.

    total: weight of all passages; computed: of those that no record before has, with all before them, as planned;
    by_rank: the same where all stand by rank.
    """

    orders: list[list[int]]
    sequence: list[int]
    total: int
    computed: int
    by_rank: int


def shared_order(records: Sequence[Passages], weights: Mapping[int, int], keep_first: int = 0) -> PassagePlan:
    """Return the plan of these records. weights: tokens (or characters) of each passage.

    keep_first: so many of each record's passages stay at its head, by rank. What is planned never costs more than the
    order by rank does.
    """
    orders, sequence = _trie(records, weights, keep_first)
    total = sum(weights[passage] for record in records for passage in record)
    planned, by_rank = computed(orders, weights), computed(records, weights)
    if planned >= by_rank:  # so little is shared that greed has gone wrong
        orders, planned = [list(record) for record in records], by_rank
        sequence = sorted(range(len(records)), key=lambda i: list(records[i]))
    return PassagePlan(orders, sequence, total, planned, by_rank)


def computed(orders: Iterable[Passages], weights: Mapping[int, int]) -> int:
    """Return the weight of all passages but those that another record has too, with all that stand before them."""
    root: dict[int, dict] = {}  # type: ignore[type-arg]  # a trie of passages
    cost = 0
    for order in orders:
        node = root
        for passage in order:
            if passage not in node:
                node[passage] = {}
                cost += weights[passage]
            node = node[passage]
    return cost


def _trie(
    records: Sequence[Passages], weights: Mapping[int, int], keep_first: int
) -> tuple[list[list[int]], list[int]]:
    """Return the orders, and the records as they stand in the trie, from left to right."""
    orders = [list(record[:keep_first]) for record in records]
    left = [dict.fromkeys(record[keep_first:]) for record in records]  # by rank
    heads: dict[tuple[int, ...], list[int]] = {}
    for i, head in enumerate(orders):
        heads.setdefault(tuple(head), []).append(i)
    sequence: list[int] = []
    waiting = list(reversed(heads.values()))
    while waiting:
        group = waiting.pop()
        if len(group) == 1:
            orders[group[0]] += left[group[0]]
            sequence += group
        else:
            waiting += reversed(_parted(group, orders, left, weights))
    return orders, sequence


def _parted(
    group: list[int], orders: list[list[int]], left: list[dict[int, None]], weights: Mapping[int, int]
) -> list[list[int]]:
    """Give each record of a group its next passage; return the groups that go on together, then each of the others."""
    holders: dict[int, dict[int, None]] = {}
    for i in group:
        for passage in left[i]:
            holders.setdefault(passage, {})[i] = None
    saved = [(-weights[passage] * (len(own) - 1), passage) for passage, own in holders.items() if len(own) > 1]
    heapify(saved)
    rest = dict.fromkeys(group)
    parts: list[list[int]] = []
    while saved:
        value, passage = heappop(saved)
        own = holders[passage]
        now = -weights[passage] * (len(own) - 1)
        if now != value:  # some of its records have gone with another passage
            if now < 0:
                heappush(saved, (now, passage))
            continue
        members = list(own)
        for i in members:
            for other in left[i]:
                holders[other].pop(i, None)
            orders[i].append(passage)
            del left[i][passage], rest[i]
        parts.append(members)
    return parts + [[i] for i in rest]
