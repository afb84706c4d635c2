"""A captured layer (layer_graph.py) as a program for our own kernels.

Linear layers and attention need all tokens at once. Everything between two of them runs token by token, number by
number, so a layer is a few stages and one call:

    stage 0: norm | q, k, v | stage 1: rotary embedding | attention | ... | stage 5: residual

graph_reader.py builds it from a graph, source.py turns it into C++. Limit: float32 and one token axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

OWN, GIVEN, LOCAL, STORED, RESULT = "own", "given", "local", "stored", "result"


@dataclass(eq=False, slots=True)
class Array:
    """Numbers of one token or, if `shared`, of all tokens. kind: where they are; number: which one of that kind.

    level: the stage in which they become known. A local array becomes stored if a later stage needs it. last: the last
    stage that reads it. used: whether any stage does.
    """

    kind: str
    number: int
    size: int
    level: int = 0
    shared: bool = False
    last: int = 0
    used: bool = False

    def needed(self, level: int, stored: bool = False) -> None:
        """Record that stage `level` reads the array. stored: as one array of all tokens."""
        self.last, self.used = max(self.last, level), True
        if self.kind == LOCAL and not self.shared and (stored or level > self.level):
            self.kind = STORED

    def whole(self, dims: Sequence[int], token: int | None, offset: int = 0) -> View:
        """Return a contiguous view from `offset` on."""
        strides = [prod(dims[axis + 1 :]) for axis in range(len(dims))]
        return View(self, offset, tuple(dims), tuple(strides), token)


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of an array. token: its token axis, which has size 1 here; None if it has none."""

    array: Array
    offset: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    token: int | None

    @property
    def contiguous(self) -> bool:
        """Whether the numbers are contiguous and in order."""
        axes = [(size, stride) for size, stride in zip(self.dims, self.strides, strict=True) if size > 1]
        return all(stride == prod(size for size, _ in axes[i + 1 :]) for i, (_, stride) in enumerate(axes))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.dims)

    def sliced(self, axis: int, first: int, last: int, step: int = 1) -> View:
        """Return the view from `first` up to `last` along an axis."""
        dims, strides = list(self.dims), list(self.strides)
        dims[axis] = max(0, -(-(last - first) // step))
        offset = self.offset + first * strides[axis]
        strides[axis] *= step
        return View(self.array, offset, tuple(dims), tuple(strides), self.token)

    def unsqueezed(self, axis: int) -> View:
        """Return the view with one more axis."""
        token = self.token if self.token is None or self.token < axis else self.token + 1
        dims = (*self.dims[:axis], 1, *self.dims[axis:])
        return View(self.array, self.offset, dims, (*self.strides[:axis], 0, *self.strides[axis:]), token)

    def without(self, axis: int) -> View:
        """Return the view without an axis of size 1."""
        token = self.token if self.token is None or self.token < axis else self.token - 1
        dims, strides = (each[:axis] + each[axis + 1 :] for each in (self.dims, self.strides))
        return View(self.array, self.offset, dims, strides, token)


Operand = View | float


@dataclass(frozen=True, slots=True)
class Map:
    """Set each number of `to` to `expression` of a, b, ...: numbers of the operands, broadcast."""

    to: View
    expression: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """Set each number of `to` to the sum of a row of `of`, times `scale`."""

    to: View
    of: View
    scale: float


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer norm of the rows of `of`. weight, bias: as long as a row, or None."""

    to: View
    of: View
    weight: View | None
    bias: View | None
    epsilon: float


Statement = Map | Sum | LayerNorm


@dataclass(frozen=True, slots=True)
class Linear:
    """The layer's linear layer of that number, for all tokens."""

    number: int
    of: Array
    to: Array


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention. query: (heads, size) per token; key, value: (kv_heads, size)."""

    query: View
    key: View
    value: View
    to: Array
    heads: int
    kv_heads: int
    size: int


@dataclass(slots=True)
class Stage:
    """Statements that run token by token, then linear layers or attention over all tokens."""

    statements: list[Statement] = field(default_factory=list)
    linears: list[Linear] = field(default_factory=list)
    attention: Attention | None = None


@dataclass(slots=True)
class Program:
    """A layer. once: statements that depend on no token. results: what it returns, each a view of all tokens."""

    stages: list[Stage]
    once: list[Statement]
    given: list[Array]
    stored: list[Array]
    results: list[View]

    def shape(self, sizes: Sequence[int]) -> list[Sequence[tuple[int, int, int]] | Attention]:
        """Return what each stage ends with: linear layers, each (inputs, outputs, bytes), or attention.

        sizes: bytes of each linear layer's weight.
        """
        return [
            stage.attention or [(each.of.size, each.to.size, sizes[each.number]) for each in stage.linears]
            for stage in self.stages
        ]

    @property
    def attention(self) -> Attention:
        """The layer's only attention."""
        return next(stage.attention for stage in self.stages if stage.attention is not None)
