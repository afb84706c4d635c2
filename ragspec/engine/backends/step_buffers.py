"""The static tensors of a step over the paged cache, and what fills them on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod

import numpy as np
import torch

from ragspec.engine.backends.cascade import CascadeTensors, SharedPrefix, fill, shapes_of
from ragspec.engine.backends.graphs import StepOutputs
from ragspec.engine.backends.paged_attention import TILE, StepTensors
from ragspec.engine.backends.step_shapes import StepRow, StepShape


class Step:
    """A step's static tensors. The host fills the arrays; load() copies them to the device at once.

    Attributes:
        token_ids, starts, counts, tables, gather, scatter: The host's, as in StepTensors; empty if not needed.
        cascade: The host's arrays as in CascadeTensors; none if rows read all of their blocks themselves.
        sources: The host's indices of the token of each row of one token in what an earlier step wrote, (R or D,).
        kept: The host's indices of the wanted logits, (R + D x m,); empty if all are wanted.
        tensors, wanted: The same on the device. wanted: None for all.
        replay: Computes `outputs` anew, once the step is captured.
        first_s: What the first run took, with compiling and capturing.
    """

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        rows, tokens, length, beside = shape.rows, shape.tokens, shape.packed, shape.beside
        every, more = rows + beside, beside * shape.beside_tokens
        shapes: list[tuple[int, ...]] = [
            (length + more,) if length else (rows, tokens),
            (every,),
            (every,),
            (every, shape.width),
            (0 if shape.all_logits else rows + more,),
            (rows, tokens) if length else (0,),
            (length,),
            (beside if length else rows,),
            *(shapes_of(rows, shape.width) if shape.cascade else ()),
        ]
        ends = [0, *accumulate(map(prod, shapes))]
        self.host = torch.zeros(ends[-1], dtype=torch.long, pin_memory=device.type == "cuda")
        self.device = torch.zeros(ends[-1], dtype=torch.long, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        mine, theirs = (
            [store[first:last].view(shape) for (first, last), shape in zip(pairwise(ends), shapes, strict=True)]
            for store in (self.host, self.device)
        )
        arrays = [each.numpy() for each in mine]
        self.token_ids, self.starts, self.counts, self.tables = arrays[:4]
        self.kept, self.gather, self.scatter, self.sources = arrays[4:8]
        self.cascade = arrays[8:]
        gather, scatter = theirs[5:7] if length else (None, None)
        cascade = CascadeTensors(*theirs[8:]) if shape.cascade else None
        self.tensors = StepTensors(theirs[0], theirs[1], theirs[2], theirs[3], gather, scatter, cascade)
        self._sources = theirs[7]
        self._written = theirs[0][length :: shape.beside_tokens] if length else theirs[0][:, 0]
        self.wanted = None if shape.all_logits else theirs[4]
        self.replay: Callable[[], None] | None = None
        self.first_s = 0.0
        self.outputs: StepOutputs | None = None

    def clear(self) -> None:
        """Make all rows padding, once the device has read what the host wrote before."""
        if self._copied is not None:
            self._copied.synchronize()
        self.host.zero_()
        self.scatter[:] = self.gather.size - 1  # of the last row, which is always padding

    def load(self, written: torch.Tensor | None = None) -> None:
        """Copy the arrays to the device. written: an earlier step's best tokens, of which `sources` are the rows'."""
        self.device.copy_(self.host, non_blocking=True)
        if written is not None:
            torch.index_select(written, 0, self._sources, out=self._written)
        if self._copied is not None:
            self._copied.record()


class StepWork:
    """What one step computes.

    Args:
        rows: The step's, those beside others last.
        token_ids: All of the forward.
        asked: Of each of these, whether its logits are wanted, (T,).
        tables: Blocks of the rows, (rows, W).
        written: As PagedSteps.begin takes it.

    Attributes:
        prefixes: What rows share, if they read that together.
        of, source: Of each token of the rows, row after row: its row, and its index in the forward.
        wanted: Indices among those tokens of the ones whose logits are wanted.
    """

    def __init__(
        self,
        rows: Sequence[StepRow],
        token_ids: Sequence[int],
        asked: np.ndarray,
        tables: np.ndarray,
        written: tuple[torch.Tensor, Sequence[int]] | None,
    ) -> None:
        self.rows = rows
        self.tables = tables
        self.written = written
        self.prefixes: Sequence[SharedPrefix] = ()
        self._token_ids = token_ids
        self._tiles = len(rows) - sum([row.beside for row in rows])
        self._counts = np.array([row.count for row in rows])
        self.of = np.repeat(np.arange(len(rows)), self._counts)
        self._within = np.arange(len(self.of)) - _starts(self._counts)[self.of]  # of each token in its row
        self.source = np.array([row.packed for row in rows])[self.of] + self._within
        self.wanted = asked[self.source].nonzero()[0]

    @property
    def several(self) -> bool:
        """Whether more than one token is wanted of a row that is not beside others."""
        return bool((np.bincount(self.of[self.wanted])[: self._tiles] > 1).any())

    def fill(self, step: Step, shape: StepShape) -> list[int]:
        """Write a step's arrays, which are all padding; return the places of the wanted logits among its own."""
        counts, tiles = self._counts, self._tiles
        numbers = np.arange(len(self.rows))
        numbers[tiles:] += shape.rows - tiles
        step.starts[numbers] = [row.start for row in self.rows]
        step.counts[numbers] = counts
        step.tables[numbers, : self.tables.shape[1]] = self.tables
        bases = np.arange(len(self.rows)) * shape.tokens  # of each row's tokens among the step's
        if shape.packed:
            bases[:tiles] = _starts(counts[:tiles])
            bases[tiles:] = shape.packed + np.arange(len(self.rows) - tiles) * shape.beside_tokens
        at = bases[self.of] + self._within
        step.token_ids.reshape(-1)[at] = np.array(self._token_ids)[self.source]
        if shape.packed:
            packed = self.of < tiles
            tile, within = numbers[self.of[packed]], self._within[packed]
            step.gather[tile, within] = at[packed]
            step.scatter[at[packed]] = tile * TILE + within
        if shape.cascade:
            fill(step.cascade, self.prefixes, self.tables)
        if self.written is not None:
            step.sources[: len(self.written[1])] = self.written[1]
        if shape.all_logits:
            return list(at[self.wanted].tolist())
        row = self.of[self.wanted]
        places = row.copy()  # of a row among tiles one is wanted at most, of one beside any
        number = np.arange(len(row)) - _starts(np.bincount(row, minlength=len(self.rows)))[row]
        beside = row >= tiles
        places[beside] = (bases[row] + number)[beside] + shape.rows - shape.packed
        step.kept[places] = at[self.wanted]
        return list(places.tolist())


def _starts(counts: np.ndarray) -> np.ndarray:
    """Return where each of several stretches begins if they follow one another. counts: their lengths."""
    found: np.ndarray = np.cumsum(counts) - counts
    return found
