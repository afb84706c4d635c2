"""Where the tokens of one forward go: segments of rows, packed one after the other without padding.

    >>> Layout([Segment(row=0, start=7, count=3), Segment(row=1, start=4, count=1)], ...)

A slot is an absolute position: a row of length n writes slots n, n+1, ...; rejecting drafts only shortens it. Segments
that decode or verify attend together, one padded batch per run of neighbouring rows of similar length; prefill segments
attend alone. Masks are the model's own (masks.py).
Limit: a run's attention is padded to its longest segment and its longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from ragspec.engine.model.kv_splits import KvSplits, Parts, PrefixGroup, split_kv
from ragspec.engine.model.masks import AttentionMask, MaskRule, attention_mask, is_causal
from ragspec.engine.native.kernels import Kernels

# torch's CPU kernel also computes masked scores, so a prompt attends in pieces, each only to the slots it sees
PIECE = {"cpu": 128, "cuda": 1 << 30}
PADDING = {"cpu": 3, "cuda": 1 << 30}  # padded queries that a row may add to a run; beyond, it starts a new one


@dataclass(slots=True)
class Segment:
    """`count` tokens of a row, written to its slots from `start` on. alone: attends outside of batches (prefill).

    base: the text length that generate() would have started with, where frequencies depend on it (forward.py).
    """

    row: int
    start: int
    count: int
    alone: bool = False
    base: int = 0


@dataclass(slots=True)
class Run:
    """Neighbouring rows whose segments attend together."""

    rows: slice
    reach: int  # slots that the longest row sees
    gather: torch.Tensor  # (rows x longest,) packed index of each query, 0 where padded
    keep: torch.Tensor | None  # indices of the packed queries in the padded batch; None: no padding
    longest: int
    queries: torch.Tensor  # (rows, longest) position of each query; padded ones repeat the row's first
    target: slice | torch.Tensor  # packed indices, in the order of `keep`
    sights: dict[tuple[MaskRule | None, int], AttentionMask] = field(default_factory=dict)

    def sight(self, rule: MaskRule | None, groups: int, dtype: torch.dtype) -> AttentionMask:
        """Return the mask of the run's queries, (rows, 1, groups x longest, slots)."""
        if (rule, groups) not in self.sights:
            self.sights[rule, groups] = attention_mask(self.queries, self.reach, rule, groups, dtype)
        return self.sights[rule, groups]


@dataclass(slots=True)
class Alone:
    """A piece of a segment that attends by itself."""

    segment: Segment
    packed: slice
    sights: dict[tuple[MaskRule | None, int], AttentionMask] = field(default_factory=dict)

    def sight(self, rule: MaskRule | None, groups: int, dtype: torch.dtype, device: torch.device) -> AttentionMask:
        """Return the mask of the piece's queries, (1, 1, groups x count, slots)."""
        if (rule, groups) not in self.sights:
            self.sights[rule, groups] = attention_mask(self.queries(device), self.end, rule, groups, dtype)
        return self.sights[rule, groups]

    @property
    def end(self) -> int:
        """Number of slots that its last query sees."""
        return self.segment.start + self.segment.count

    def queries(self, device: torch.device) -> torch.Tensor:
        """Return the position of each query, (1, count)."""
        return torch.arange(self.segment.start, self.end, device=device)[None]


Attend = Callable[[], torch.Tensor]


class ForwardProfiler(Protocol):
    """Times a forward (profiler.py)."""

    def forward(self, layout: Layout) -> AbstractContextManager[None]: ...

    def attend(self, layout: Layout, query: torch.Tensor, slot: int, do: Attend) -> torch.Tensor: ...

    def layer(self, layout: Layout, shape: Sequence[Any], seconds: Sequence[float]) -> None: ...


class Layout:
    """The packed order of one forward of T tokens.

    Args:
        segments: In packed order.
        slots: Capacity of a row in the cache.
        device: The model's.
        together: Rows with a common prefix.
        kernels: For attention; None: torch's.
        padding: Tokens at the end that are computed and belong to no row.
        parts: Which rows hold the slots of a row; None where each holds its own.
    """

    def __init__(
        self,
        segments: list[Segment],
        slots: int,
        device: torch.device,
        together: Sequence[PrefixGroup] = (),
        kernels: Kernels | None = None,
        padding: int = 0,
        parts: Parts | None = None,
    ) -> None:
        self.kernels = kernels
        self.padding = padding
        self.watch: ForwardProfiler | None = None  # set while the model is profiled
        self._causal: dict[MaskRule | None, bool] = {None: True}
        self._together = together
        self._parts = parts
        self._slots = slots
        self.segments = segments
        self.device = device
        positions: list[int] = []
        self.lengths: list[int] = []  # per token, the text length with which generate() would compute it
        self.starts: list[int] = []  # packed index of each segment's first token
        for segment in segments:
            self.starts.append(len(positions))
            positions.extend(range(segment.start, segment.start + segment.count))
            self.lengths.extend(max(segment.base, at + 1) for at in range(segment.start, segment.start + segment.count))
        self.tokens = len(positions)
        self.positions = torch.tensor(positions + positions[:1] * padding, device=device)  # (T + padding,)

    @cached_property
    def alone(self) -> list[Alone]:
        """Prefill segments, in pieces."""
        most = PIECE.get(self.device.type, PIECE["cpu"])
        pieces = []
        for segment, at in zip(self.segments, self.starts, strict=True):
            if segment.alone:
                for first in range(0, segment.count, most):
                    count = min(most, segment.count - first)
                    part = Segment(segment.row, segment.start + first, count, alone=True)
                    pieces.append(Alone(part, slice(at + first, at + first + count)))
        return pieces

    @cached_property
    def writes(self) -> torch.Tensor:
        """Where the tokens are written, (T,): row x slots + slot."""
        found: list[int] = []
        for segment in self.segments:
            own = (segment.row, segment.start, segment.start + segment.count)
            for row, first, last in self._parts(*own) if self._parts else [own]:
                found.extend(range(row * self._slots + first, row * self._slots + last))
        return torch.tensor(found, device=self.device)

    @cached_property
    def pieces(self) -> KvSplits:
        """All segments, as the kernels compute them."""
        queries = {
            segment.row: [(at + i, segment.start + i + 1) for i in range(segment.count)]
            for segment, at in zip(self.segments, self.starts, strict=True)
        }
        return split_kv(queries, self._together, self.tokens, torch.get_num_threads(), self._parts)

    def forget_parts(self) -> None:
        """Read and write anew where each row holds its own copies."""
        self._parts = None
        for name in ("pieces", "writes"):
            self.__dict__.pop(name, None)

    @property
    def distinct_slots(self) -> int:
        """Slots that the forward has to read, with common prefixes counted once."""
        reach = {segment.row: segment.start + segment.count for segment in self.segments}
        return sum(reach.values()) - sum(sum(group.tokens.values()) for group in self._together)

    def causal(self, rule: MaskRule | None) -> bool:
        """Return whether `rule` is the plain causal mask for this layout's queries."""
        if rule is not None and rule not in self._causal:
            seen = [(run.queries, run.reach) for run in self.runs]
            seen += [(alone.queries(self.device), alone.end) for alone in self.alone]
            self._causal[rule] = all(is_causal(queries, reach, rule) for queries, reach in seen)
        return self._causal[rule]

    @cached_property
    def runs(self) -> list[Run]:
        """Segments that decode or verify, gathered by neighbouring rows."""
        together = sorted(
            ((s, at) for s, at in zip(self.segments, self.starts, strict=True) if not s.alone),
            key=lambda pair: pair[0].row,
        )
        runs: list[list[tuple[Segment, int]]] = []
        for pair in together:
            if runs and runs[-1][-1][0].row + 1 == pair[0].row and self._fits(runs[-1], pair[0].count):
                runs[-1].append(pair)
            else:
                runs.append([pair])
        return [self._run(pairs) for pairs in runs]

    def _fits(self, run: list[tuple[Segment, int]], count: int) -> bool:
        """Return whether adding `count` queries as a row costs less in padding than a call of its own."""
        longest = max(segment.count for segment, _ in run)
        padding = longest - count if count <= longest else len(run) * (count - longest)
        return padding <= PADDING.get(self.device.type, PADDING["cpu"])

    def _run(self, pairs: list[tuple[Segment, int]]) -> Run:
        longest = max(segment.count for segment, _ in pairs)
        gather: list[int] = []
        queries: list[list[int]] = []
        keep: list[int] = []
        packed: list[int] = []
        for number, (segment, at) in enumerate(pairs):
            pad = longest - segment.count
            gather.extend(range(at, at + segment.count))
            gather.extend([at] * pad)
            queries.append([*range(segment.start, segment.start + segment.count), *[segment.start] * pad])
            keep.extend(range(number * longest, number * longest + segment.count))
            packed.extend(range(at, at + segment.count))
        tight = packed == list(range(packed[0], packed[0] + len(packed)))
        return Run(
            rows=slice(pairs[0][0].row, pairs[-1][0].row + 1),
            reach=max(segment.start + segment.count for segment, _ in pairs),
            gather=torch.tensor(gather, device=self.device),
            keep=None if len(keep) == len(gather) else torch.tensor(keep, device=self.device),
            longest=longest,
            queries=torch.tensor(queries, device=self.device),
            target=slice(packed[0], packed[0] + len(packed)) if tight else torch.tensor(packed, device=self.device),
        )
