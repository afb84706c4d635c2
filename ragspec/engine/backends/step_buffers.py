"""The static tensors of a step over the paged cache, and what fills them on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(slots=True)
class StepWork:
    """What one step computes: rows, the packed indices that are wanted of each, tables, (rows, W), and the prefixes
    that rows share. written: as PagedSteps.begin takes it."""

    rows: Sequence[StepRow]
    indices: Sequence[Sequence[int]]
    token_ids: Sequence[int]
    tables: np.ndarray
    written: tuple[torch.Tensor, Sequence[int]] | None
    prefixes: Sequence[SharedPrefix] = ()

    def fill(self, step: Step, shape: StepShape) -> list[int]:
        """Write a step's arrays, which are all padding; return the places of the wanted logits among its own."""
        rows, count = self.rows, len(self.rows)
        counts = [row.count for row in rows]
        tiles = count - sum(row.beside for row in rows)
        numbers = [*range(tiles), *range(shape.rows, shape.rows + count - tiles)]
        step.starts[numbers] = [row.start for row in rows]
        step.counts[numbers] = counts
        step.tables[numbers, : self.tables.shape[1]] = self.tables
        bases = [at * shape.tokens for at in range(count)]  # of each row's tokens among the step's
        if shape.packed:
            bases = [*accumulate([0, *counts[: tiles - 1]])]
            bases += range(shape.packed, shape.size, shape.beside_tokens)[: count - tiles]
            for at, (row, base) in enumerate(zip(rows[:tiles], bases, strict=False)):
                step.token_ids[base : base + row.count] = self.token_ids[row.packed : row.packed + row.count]
                step.gather[at, : row.count] = range(base, base + row.count)
                step.scatter[base : base + row.count] = range(at * TILE, at * TILE + row.count)
            for row, base in zip(rows[tiles:], bases[tiles:], strict=True):
                step.token_ids[base : base + row.count] = self.token_ids[row.packed : row.packed + row.count]
        elif shape.tokens == 1:
            step.token_ids[:count, 0] = [self.token_ids[row.packed] for row in rows]
        else:
            for mine, row in zip(step.token_ids, rows, strict=False):
                mine[: row.count] = self.token_ids[row.packed : row.packed + row.count]
        if shape.cascade:
            fill(step.cascade, self.prefixes, self.tables)
        if self.written is not None:
            step.sources[: len(self.written[1])] = self.written[1]
        places: list[int] = []
        for number, row, base, indices in zip(numbers, rows, bases, self.indices, strict=True):
            found = [base + index - row.packed for index in indices]
            if not shape.all_logits and found:  # of a row among tiles one at most, of one beside any
                place = shape.rows + base - shape.packed if row.beside else number
                step.kept[place : place + len(found)] = found
                found = [*range(place, place + len(found))]
            places += found
        return places
