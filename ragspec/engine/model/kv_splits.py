"""Splits of the KV cache for the attention kernels (native/): masked slots are skipped, common prefixes read once.

Rows with a common prefix attend to it together: one row's slots are read for all. Each query's result on a split is
partial; partial results are merged by their log-sum-exp.
Sources: Dao et al., Flash-Decoding (2023); Juravsky et al., Hydragen (2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ragspec.engine.kv.block_pool import ROW_BLOCK, Part

LONGEST = 512  # slots of a split that few queries see, as in kernels.cpp
DEEPEST = 2048  # slots of a split that a full tile of queries sees: fewer partial results to merge
SHORTEST = 64  # slots that keep a core busy for longer than handing them over takes
TILE = 32  # queries of a tile, a part of a prompt: they see nearly the same slots

Query = tuple[int, int]  # packed index of a token, number of slots that it sees
Parts = Callable[[int, int, int], Sequence[Part]]  # where a row's tokens are, from a first to before a last one
Span = tuple[int, int, int, list[Query]]  # row, first slot, end slot, queries that read them


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows that have their first slots in common with `leader`. tokens: how many, by row."""

    leader: int
    tokens: Mapping[int, int]

    def in_blocks(self) -> PrefixGroup:
        """Return the group with whole blocks in common."""
        whole = {row: tokens // ROW_BLOCK * ROW_BLOCK for row, tokens in self.tokens.items()}
        return PrefixGroup(self.leader, {row: tokens for row, tokens in whole.items() if tokens})


@dataclass(frozen=True, slots=True)
class KvSplits:
    """The work of the kernel, all int64.

    pieces: (P, 5) row, first slot, end slot, first entry, end entry. entries: (E, 3) token, slots it sees, number of
    its partial result. parts: (T, 2) first and end partial result of each token; empty for tokens that attend
    elsewhere. count: number of partial results.
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
    parts: Parts | None = None,
) -> KvSplits:
    """Return the splits of a forward of `tokens` tokens. queries: by row. parts: None where each row holds its own.

    Where rows share blocks, they read them together, and each what it has of an incomplete last one: few queries read
    that sooner than they merge another partial result.
    """
    if parts is not None:
        together = [group.in_blocks() for group in together]
    spans = [tile for span in _held(_spans(queries, together), parts) for tile in _tiles(*span)]
    length = sum(last - first for _, first, last, _ in spans) // (2 * threads)  # about two splits per core
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
    merged = torch.tensor(list(zip(following, ends, strict=True)), dtype=torch.long)
    entries = []
    for token, seen in asked:
        entries.append((token, seen, following[token]))
        following[token] += 1
    return KvSplits(torch.tensor(pieces), torch.tensor(entries), merged, len(entries))


def _held(spans: Sequence[Span], parts: Parts | None) -> Iterator[Span]:
    """Yield the spans, read from the rows that hold them."""
    for row, first, last, who in spans:
        for holder, begin, end in parts(row, first, last) if parts else [(row, first, last)]:
            yield holder, begin, end, [query for query in who if query[1] > begin]


def _tiles(row: int, first: int, last: int, who: list[Query]) -> Iterator[Span]:
    """Yield a span in tiles of at most TILE queries, each no longer than they see."""
    for begin in range(0, len(who), TILE):
        some = who[begin : begin + TILE]
        yield row, first, min(last, max(seen for _, seen in some)), some


def _spans(queries: Mapping[int, Sequence[Query]], together: Sequence[PrefixGroup]) -> list[Span]:
    """Return the spans to read: common prefixes first, then each row's own slots."""
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
