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
        counts, first = (np.array([getattr(row, name) for row in rows]) for name in ("count", "packed"))
        tiles = count - sum(row.beside for row in rows)
        numbers = np.arange(count)
        numbers[tiles:] += shape.rows - tiles
        step.starts[numbers] = [row.start for row in rows]
        step.counts[numbers] = counts
        step.tables[numbers, : self.tables.shape[1]] = self.tables
        bases = np.arange(count) * shape.tokens  # of each row's tokens among the step's
        if shape.packed:
            bases[:tiles] = _starts(counts[:tiles])
            bases[tiles:] = shape.packed + np.arange(count - tiles) * shape.beside_tokens
        within = np.arange(counts.sum()) - np.repeat(_starts(counts), counts)  # of each token in its row
        at = np.repeat(bases, counts) + within
        step.token_ids.reshape(-1)[at] = np.array(self.token_ids)[np.repeat(first, counts) + within]
        if shape.packed:
            tile = np.repeat(numbers[:tiles], counts[:tiles])
            at, within = at[: len(tile)], within[: len(tile)]
            step.gather[tile, within] = at
            step.scatter[at] = tile * TILE + within
        if shape.cascade:
            fill(step.cascade, self.prefixes, self.tables)
        if self.written is not None:
            step.sources[: len(self.written[1])] = self.written[1]
        wanted = np.array([len(mine) for mine in self.indices])
        row = np.repeat(np.arange(count), wanted)
        found = bases[row] - first[row] + np.array([index for mine in self.indices for index in mine], dtype=np.int64)
        if shape.all_logits:
            return list(found.tolist())
        places = row  # of a row among tiles one is wanted at most, of one beside any
        beside = row >= tiles
        places[beside] = (bases[row] + np.arange(len(row)) - _starts(wanted)[row])[beside] + shape.rows - shape.packed
        step.kept[places] = found
        return list(places.tolist())


def _starts(counts: np.ndarray) -> np.ndarray:
    """Return where each of several stretches begins if they follow one another. counts: their lengths."""
    found: np.ndarray = np.cumsum(counts) - counts
    return found
