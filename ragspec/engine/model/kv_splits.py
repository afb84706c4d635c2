"""Attention cut into pieces for the kernels (native/): what no query sees is not computed, and what a row decodes with
is read once.

Rows that hold the same first tokens attend to them together: one of them is read for all. What a query makes of each
piece is a part of its result, merged by the logarithm of the sum of its weights.
Sources: Dao et al., Flash-Decoding (2023); Juravsky et al., Hydragen (2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ragspec.engine.kv.prefix_blocks import PrefixBlocks

LONGEST = 512  # slots of a piece that few queries see, as in kernels.cpp
DEEPEST = 2048  # slots of a tile: fewer parts to merge
SHORTEST = 64  # slots that keep a core busy for longer than it takes to hand them over
TILE = 32  # queries of a tile, a part of a prompt: they see nearly the same slots

Query = tuple[int, int]  # packed index of a token, and how many slots it sees
Span = tuple[int, int, int, list[Query]]  # row, first and last slot, and the queries for which they are read


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows whose first slots hold what those of `leader` hold. tokens: how many, by row."""

    leader: int
    tokens: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class KvSplits:
    """What the kernel does. All int64.

    pieces: (P, 5) row, first and last slot, first and last of its entries. entries: (E, 3) token, slots it sees, number
    of its part. parts: (T, 2) first and last part of each token; none for tokens that attend elsewhere. count: how many
    parts there are.
    """

    pieces: torch.Tensor
    entries: torch.Tensor
    parts: torch.Tensor
    count: int


def split_kv(
    queries: Mapping[int, Sequence[Query]],
    together: Sequence[PrefixGroup],
    tokens: int,
    threads: int,
    prefix_blocks: PrefixBlocks | None = None,
) -> KvSplits:
    """Return the pieces of a forward of `tokens` tokens. queries: of each row. loans: who holds what rows borrow."""
    spans = [tile for span in _held(_spans(queries, together), prefix_blocks) for tile in _tiles(*span)]
    length = sum(last - first for _, first, last, _ in spans) // (2 * threads)  # some pieces for each core
    length = max(SHORTEST, -(-length // 16) * 16)
    pieces: list[tuple[int, int, int, int, int]] = []
    asked: list[Query] = []
    for row, first, last, who in spans:
        step = min(length, LONGEST if len(who) < TILE else DEEPEST)
        for at in range(first, last, step):
            begin = len(asked)
            asked += [query for query in who if query[1] > at]
            pieces.append((row, at, min(last, at + step), begin, len(asked)))
    counts = [0] * tokens
    for token, _ in asked:
        counts[token] += 1
    ends = list(accumulate(counts))
    following = [end - count for end, count in zip(ends, counts, strict=True)]
    parts = torch.tensor(list(zip(following, ends, strict=True)), dtype=torch.long)
    entries = []
    for token, seen in asked:
        entries.append((token, seen, following[token]))
        following[token] += 1
    return KvSplits(torch.tensor(pieces), torch.tensor(entries), parts, len(entries))


def _held(spans: Sequence[Span], prefix_blocks: PrefixBlocks | None) -> Iterator[Span]:
    """Yield the spans, each read where it is."""
    for row, first, last, who in spans:
        for holder, begin, end in prefix_blocks.parts(row, first, last) if prefix_blocks else [(row, first, last)]:
            yield holder, begin, end, [query for query in who if query[1] > begin]


def _tiles(row: int, first: int, last: int, who: list[Query]) -> Iterator[Span]:
    """Yield a span in parts of at most TILE queries, each as far as they see."""
    for begin in range(0, len(who), TILE):
        some = who[begin : begin + TILE]
        yield row, first, min(last, max(seen for _, seen in some)), some


def _spans(queries: Mapping[int, Sequence[Query]], together: Sequence[PrefixGroup]) -> list[Span]:
    """Return what is read."""
    spans: list[Span] = []
    own = dict.fromkeys(queries, 0)  # the first slot that only the row itself reads
    for group in together:
        read = 0
        for edge in sorted(set(group.tokens.values())):
            rows = [group.leader, *(row for row, tokens in group.tokens.items() if tokens >= edge)]
            spans.append((group.leader, read, edge, [query for row in rows for query in queries[row]]))
            read = edge
        own |= {group.leader: read, **group.tokens}
    for row, who in queries.items():
        spans.append((row, own[row], max(seen for _, seen in who), list(who)))
    return spans
