"""Cascade attention: a prefix that rows share is read once for many of them, and each row's own tokens by itself.

Rows with the same first blocks are put in chunks, whose queries attend together to those blocks; what a row gets there
and from its other blocks is merged by the sums of exponentials (log-sum-exp) of both.
Source: Ye et al. 2024, Cascade Inference; Juravsky et al. 2024, Hydragen, arXiv:2402.05099.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

MEMBERS = 16  # rows of a chunk, at most
SHARE = 4  # a step has a chunk for so many rows
LEVELS = 16  # of prefixes that begin with one another; what branches further on is read by row
WORTH = 0.05  # of the bytes that a step reads, from which on reading less is worth a try
PAUSE = 1.0  # seconds between steps beyond which the engine had nothing to do
EMPTY = 0  # the chunk of rows that share nothing


class SharedPrefix(NamedTuple):
    """Rows of a step, and the number of blocks that they all begin with."""

    rows: list[int]
    blocks: int

    @property
    def chunks(self) -> int:
        """Number of chunks for the rows."""
        return -(-len(self.rows) // MEMBERS)

    @property
    def saved(self) -> int:
        """Number of blocks that need not be read."""
        return (len(self.rows) - self.chunks) * self.blocks


def shared_prefixes(tables: np.ndarray, whole: np.ndarray, chunks: int) -> list[SharedPrefix]:
    """Return which rows to read together in at most `chunks` chunks, so that few blocks are read.

    Args:
        tables: (rows, W) of blocks.
        whole: (rows,) number of first blocks that all of the row's tokens see in full.
    """
    texts = [table.tobytes() for table in tables]
    rows = sorted(whole.nonzero()[0].tolist(), key=texts.__getitem__)  # those that share blocks are adjacent
    found = sorted(_split(tables, whole, rows, 0), key=lambda prefix: prefix.saved, reverse=True)
    kept = []
    for prefix in found:
        if prefix.chunks <= chunks:
            chunks -= prefix.chunks
            kept.append(prefix)
    return kept


def _split(
    tables: np.ndarray, whole: np.ndarray, rows: list[int], depth: int, levels: int = LEVELS
) -> list[SharedPrefix]:
    """Return prefixes of rows that share their first `depth` blocks: one of all of them, or longer ones of some."""
    if len(rows) < 2:
        return []
    end = min(whole[row] for row in rows)
    same = (tables[rows, depth:end] == tables[rows[0], depth:end]).all(0)
    end = int(end if same.all() else depth + same.argmin())
    together = SharedPrefix(rows, end)
    longer = [row for row in rows if whole[row] > end and levels]
    apart = [
        prefix
        for _, some in groupby(longer, key=lambda row: tables[row, end])
        for prefix in _split(tables, whole, list(some), end + 1, levels - 1)
    ]
    if together.saved >= sum(prefix.saved for prefix in apart):
        return [together] if together.saved else []
    return apart


class CascadeChoice:
    """Which steps read prefixes once: those that were faster so when both ways were timed.

    A trial compiles and captures another step. It is due once steps of that kind may have lost as much time.
    """

    def __init__(self) -> None:
        self._faster: dict[Hashable, bool] = {}
        self._lost: dict[Hashable, float] = {}  # seconds, by kind of step
        self._last = float("inf")  # when the last step began

    def of(self, kind: Hashable) -> bool | None:
        """Return whether steps of a kind are faster so; None if unknown."""
        return self._faster.get(kind)

    def due(self, kind: Hashable, share: float, trial_s: float, now: float) -> bool:
        """Return whether to time both ways, at a step that begins now. Called for every step with a prefix to share.

        share: of the step's time that may be saved. trial_s: what a trial takes.
        """
        spent, self._last = min(max(0.0, now - self._last), PAUSE), now
        if kind in self._faster:
            return False
        self._lost[kind] = self._lost.get(kind, 0.0) + share * spent
        return self._lost[kind] >= trial_s

    def learn(self, kind: Hashable, faster: bool) -> None:
        """Remember what a trial has shown."""
        self._faster[kind] = faster


class CascadeTensors(NamedTuple):
    """The chunks of a step, on the host or on the device; the first is empty. Rows without a prefix are in that one.

    Attributes:
        tables: (chunks, W) the blocks that each chunk's rows begin with.
        blocks: (chunks,) their number.
        members: (chunks, M) rows; any for padding.
        places: (R,) where each row is among the members of all chunks.
        covered: (R,) number of the row's first blocks that its chunk reads for it.
    """

    tables: torch.Tensor
    blocks: torch.Tensor
    members: torch.Tensor
    places: torch.Tensor
    covered: torch.Tensor

    def to(self, device: torch.device) -> CascadeTensors:
        """Return copies on another device."""
        return CascadeTensors(*(each.to(device) for each in self))

    def together(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the queries of chunks, (chunks, heads, M x n, head_dim), of those of rows, (R, heads, n, head_dim)."""
        chunks, most = self.members.shape
        rows = queries.index_select(0, self.members.flatten()).view(chunks, most, *queries.shape[1:])
        return rows.transpose(1, 2).flatten(2, 3)

    def merged(
        self, own: tuple[torch.Tensor, torch.Tensor], prefix: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values, (R, heads, n, head_dim), and log-sum-exps, (R, heads, n), over all that a row sees.

        own: those over the blocks that rows read themselves. prefix: those of chunks, (chunks, heads, M x n, ...).
        """
        values, lse = (self._by_row(each) for each in prefix)
        lse = lse.masked_fill((self.covered == 0)[:, None, None], float("-inf"))
        weights = torch.sigmoid(lse - own[1])[..., None]  # float32, as the sums are
        return (own[0] * (1 - weights) + values * weights).to(own[0].dtype), torch.logaddexp(lse, own[1])

    def _by_row(self, values: torch.Tensor) -> torch.Tensor:
        (chunks, most), (heads, tokens) = self.members.shape, values.shape[1:3]
        of_members = values.reshape(chunks, heads, most, tokens // most, *values.shape[3:])
        return of_members[self.places // most, :, self.places % most]


def most_chunks(rows: int) -> int:
    """Return the most chunks of a step of so many rows, padding included."""
    return rows // SHARE


def shapes_of(rows: int, width: int) -> list[tuple[int, ...]]:
    """Return the shapes of CascadeTensors for a step of so many rows, and tables of that width."""
    chunks = 1 + most_chunks(rows)
    return [(chunks, width), (chunks,), (chunks, min(MEMBERS, rows)), (rows,), (rows,)]


def fill(arrays: Sequence[np.ndarray], prefixes: Sequence[SharedPrefix], row_tables: np.ndarray) -> None:
    """Write the chunks of `prefixes` into zeroed arrays, in the order of CascadeTensors. row_tables: (rows, W)."""
    tables, blocks, members, places, covered = arrays
    most = members.shape[1]
    chunks = [
        (prefix.rows[first : first + most], prefix.blocks)
        for prefix in prefixes
        for first in range(0, len(prefix.rows), most)
    ]
    for chunk, (rows, count) in enumerate(chunks, EMPTY + 1):
        tables[chunk, :count] = row_tables[rows[0], :count]
        blocks[chunk] = count
        members[chunk, : len(rows)] = rows
        places[rows] = chunk * most + np.arange(len(rows))
        covered[rows] = count
