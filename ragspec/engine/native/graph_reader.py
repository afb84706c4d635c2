"""Read a captured layer (layer_graph.py) as a program for our own kernels (program.py).

VIEWS are operators that only reorder or select numbers; OPERATORS compute. Limit: float32, one token axis, and these
operators; anything else raises NotCaptured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from operator import getitem
from typing import Any

import torch

from ragspec.engine.model.layer_graph import Graph, NotCaptured
from ragspec.engine.native.program import (
    GIVEN,
    LOCAL,
    OWN,
    RESULT,
    STORED,
    Array,
    Attention,
    LayerNorm,
    Linear,
    Map,
    Operand,
    Program,
    Stage,
    Statement,
    Sum,
    View,
)


def name_of(node: Any) -> str:
    """Return a node's operator, as torch names it."""
    return str(node.target).removeprefix("aten.")


def dims_of(node: Any) -> tuple[tuple[int, ...], int | None]:
    """Return a node's sizes, with 1 for the token axis, and the index of that axis."""
    shape = node.meta["val"].shape
    tokens = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
    if len(tokens) > 1 or any(not shape[axis].node.expr.is_symbol for axis in tokens):
        raise NotCaptured("computes with numbers of tokens")
    dims = tuple(1 if axis in tokens else int(size) for axis, size in enumerate(shape))
    return dims, tokens[0] if tokens else None


def _axis(view: View, axis: int, what: str) -> int:
    """Return an axis counted from the front. what: the operation on it, for the error if it is the token axis."""
    axis %= len(view.dims)
    if axis == view.token:
        raise NotCaptured(f"{what} tokens")
    return axis


def _permuted(view: View, order: list[int]) -> View:
    token = None if view.token is None else order.index(view.token)
    dims, strides = ([each[axis] for axis in order] for each in (view.dims, view.strides))
    return View(view.array, view.offset, tuple(dims), tuple(strides), token)


def _permute(view: View, node: Any) -> View:
    return _permuted(view, [axis % len(view.dims) for axis in node.args[1]])


def _transpose(view: View, node: Any) -> View:
    one, other = (axis % len(view.dims) for axis in node.args[1:3])
    order = list(range(len(view.dims)))
    order[one], order[other] = other, one
    return _permuted(view, order)


def _unsqueeze(view: View, node: Any) -> View:
    return view.unsqueezed(node.args[1] % (len(view.dims) + 1))


def _squeeze(view: View, node: Any) -> View:
    axis = _axis(view, node.args[1], "drops the axis of")
    return view.without(axis) if view.dims[axis] == 1 else view


def _expand(view: View, node: Any) -> View:
    dims, token = dims_of(node)
    more = len(dims) - len(view.dims)
    if token is not None and (view.token is None or view.token + more != token):
        raise NotCaptured("repeats something for each token")
    old, strides = (1,) * more + view.dims, (0,) * more + view.strides
    strides = tuple(0 if was != now else stride for was, now, stride in zip(old, dims, strides, strict=True))
    return View(view.array, view.offset, dims, strides, token)


def _slice(view: View, node: Any) -> View:
    given = list(node.args[1:])
    if not all(isinstance(each, int | None) for each in given):
        raise NotCaptured("slices by the number of tokens")
    axis, first, last, step = given + [0, None, None, 1][len(given) :]
    whole = first in (0, None) and step == 1
    if whole and axis % len(view.dims) == view.token and dims_of(node) == (view.dims, view.token):
        return view  # all tokens: fewer would be another symbol, or none
    axis = _axis(view, axis, "takes some of the")
    first, last, step = slice(first, last, step).indices(view.dims[axis])
    return view.sliced(axis, first, last, step)


def _select(view: View, node: Any) -> View:
    axis = _axis(view, node.args[1], "takes one of the")
    at = node.args[2] % view.dims[axis]
    return view.sliced(axis, at, at + 1).without(axis)


def _split(view: View, node: Any) -> list[View]:
    axis, sizes = _axis(view, node.args[2] if len(node.args) > 2 else 0, "splits"), node.args[1]
    if isinstance(sizes, int):
        sizes = [min(sizes, view.dims[axis] - at) for at in range(0, view.dims[axis], sizes)]
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [view.sliced(axis, first, last) for first, last in pairwise(edges)]


def _same(view: View, node: Any) -> View:
    return view


VIEWS: dict[str, Callable[[View, Any], View | list[View]]] = {
    "permute.default": _permute,
    "transpose.int": _transpose,
    "unsqueeze.default": _unsqueeze,
    "squeeze.dim": _squeeze,
    "expand.default": _expand,
    "slice.Tensor": _slice,
    "select.int": _select,
    "split.Tensor": _split,
    "split_with_sizes.default": _split,
    "clone.default": _same,
    "alias.default": _same,
    "detach.default": _same,
}


# -- programs --------------------------------------------------------------------------------------
def program_of(graph: Graph, owned: int) -> Program:
    """Return a captured layer as a program. owned: how many of its tensors are its own. Raises NotCaptured."""
    return _Reader(graph, owned).read()


class _Reader:
    def __init__(self, graph: Graph, owned: int) -> None:
        self._nodes = list(graph.module.graph.nodes)
        self._owned = owned
        self._stages: list[Stage] = [Stage()]
        self._once: list[Statement] = []
        self._given: list[Array] = []
        self._arrays: list[Array] = []
        self._known: dict[Any, Any] = {}  # node -> View, or a list of them

    def read(self) -> Program:
        results: list[View] = []
        inputs = 0
        for node in self._nodes:
            if node.op == "placeholder":
                self._known[node] = self._input(node, inputs)
                inputs += 1
            elif node.op == "output":
                results = [self._result(self._view(one), number) for number, one in enumerate(node.args[0])]
            elif _changes_something(node):
                raise NotCaptured(f"computes {name_of(node)} in place, which kernels do not")
            elif node.users:
                self._known[node] = self._call(node)
        stored = [array for array in self._arrays if array.kind == STORED]
        return Program(self._stages, self._once, self._given, stored, results)

    # -- tensors -----------------------------------------------------------------------------------

    def _input(self, node: Any, number: int) -> View | None:
        """Return a tensor that the layer owns or is given; None if it is not float32, and must not be used."""
        dims, token = dims_of(node)
        own = number < self._owned
        array = Array(OWN if own else GIVEN, number - self._owned * (not own), prod(dims), shared=token is None)
        if not own:
            self._given.append(array)
        if node.meta["val"].dtype != torch.float32 or (own and token is not None):
            return None
        if token is not None and prod(dims[:token]) != 1:
            raise NotCaptured("is given tensors whose tokens are not in one row")
        return array.whole(dims, token)

    def _view(self, node: Any) -> View:
        found = self._known.get(node)
        if not isinstance(found, View):
            raise NotCaptured(f"computes with {node} in a way that kernels do not")
        return found

    def _array(self, size: int, level: int, shared: bool, kind: str = LOCAL) -> Array:
        array = Array(kind, len(self._arrays), size, level, shared, last=level)
        self._arrays.append(array)
        return array

    def _new(self, node: Any, operands: Sequence[Operand]) -> View:
        """Return a new array for a node's result, at the level at which its operands are known."""
        dims, token = dims_of(node)
        level = max((one.array.level for one in operands if isinstance(one, View)), default=0)
        return self._array(prod(dims), level, token is None).whole(dims, token)

    def _add(self, statement: Statement, *operands: Operand | None) -> None:
        level, shared = statement.to.array.level, statement.to.array.shared
        for one in operands:
            if isinstance(one, View):
                one.array.needed(level)
        (self._once if shared else self._stages[level].statements).append(statement)

    def _stored(self, view: View) -> View:
        """Return a tensor, copied if needed, so that each token's numbers are contiguous in one array."""
        if not view.contiguous or view.array.kind == GIVEN or view.offset or view.size != view.array.size:
            view = self._copied(view)
        view.array.needed(view.array.level, stored=True)
        return view

    def _copied(self, view: View) -> View:
        array = self._array(view.size, view.array.level, view.token is None)
        copy = array.whole(view.dims, view.token)
        self._add(Map(copy, "a", (view,)), view)
        return copy

    def _result(self, view: View, number: int) -> View:
        array = view.array
        if view.token is None or prod(view.dims[: view.token]) != 1:
            raise NotCaptured("returns something else than a row of tokens")
        if array.kind != LOCAL or array.shared or not view.contiguous or view.size != array.size:
            view = self._copied(view)
        view.array.kind, view.array.number = RESULT, number
        return view

    # -- calls -------------------------------------------------------------------------------------

    def _call(self, node: Any) -> Any:
        value = node.meta["val"]
        if isinstance(value, torch.SymInt):
            return None  # a size: each node has its own
        if node.target is getitem:
            return self._known[node.args[0]][node.args[1]]
        name = name_of(node)
        if name not in OPERATORS and name not in VIEWS:
            raise NotCaptured(f"computes {name}, which kernels do not")
        if isinstance(value, torch.Tensor) and value.dtype != torch.float32:
            raise NotCaptured(f"computes {name} in {value.dtype}")
        return VIEWS[name](self._view(node.args[0]), node) if name in VIEWS else OPERATORS[name](self, node)

    def _operand(self, value: Any) -> Operand:
        return float(value) if isinstance(value, int | float) else self._view(value)

    def map(self, node: Any, expression: str, *values: Any) -> View:
        """Return the elementwise result of `expression` on `values`."""
        operands = tuple(self._operand(value) for value in values)
        to = self._new(node, operands)
        self._add(Map(to, expression, operands), *operands)
        return to

    def pow(self, node: Any) -> View:
        expressions = {2: "a * a", 3: "a * a * a", 0.5: "root(a)", -0.5: "1.0f / root(a)", -1: "1.0f / a"}
        if node.args[1] not in expressions:
            raise NotCaptured(f"computes powers of {node.args[1]}, which kernels do not")
        return self.map(node, expressions[node.args[1]], node.args[0])

    def plus(self, node: Any, sign: str) -> View:
        alpha = node.kwargs.get("alpha", 1)
        if alpha == 1:
            return self.map(node, f"a {sign} b", *node.args[:2])
        return self.map(node, f"a {sign} c * b", *node.args[:2], alpha)

    def minus_from(self, node: Any) -> View:
        if len(node.args) > 2 or node.kwargs.get("alpha", 1) != 1:
            raise NotCaptured("subtracts multiples, which kernels do not")
        return self.map(node, "b - a", *node.args[:2])

    def sum(self, node: Any, mean: bool) -> View:
        of = self._view(node.args[0])
        axes = [axis % len(of.dims) for axis in node.args[1]]
        if axes != [len(of.dims) - 1] or of.token == axes[0]:
            raise NotCaptured("sums over more than a token's rows")
        if of.strides[-1] != 1 and of.dims[-1] > 1:
            of = self._copied(of)
        dims, token = dims_of(node)
        to = self._array(prod(dims), of.array.level, token is None).whole(dims, token)
        self._add(Sum(to, of, 1 / of.dims[-1] if mean else 1.0), of)
        return to

    def layer_norm(self, node: Any) -> list[View | None]:
        of, weight, bias = (self._view(one) if one is not None else None for one in (node.args[0], *node.args[2:4]))
        assert of is not None
        if list(node.args[1]) != [of.dims[-1]] or of.token == len(of.dims) - 1:
            raise NotCaptured("norms more than a token's rows")
        of = of if of.contiguous else self._copied(of)
        to = self._array(of.size, of.array.level, of.token is None).whole(of.dims, of.token)
        self._add(LayerNorm(to, of, weight, bias, node.args[4]), of, weight, bias)
        return [to, None, None]

    def cat(self, node: Any, stacked: bool = False) -> View:
        parts = [self._view(one) for one in node.args[0]]
        to = self._new(node, parts)
        axis = (node.args[1] if len(node.args) > 1 else 0) % len(to.dims)
        if axis == to.token:
            raise NotCaptured("joins tokens")
        if stacked:
            parts = [part.unsqueezed(axis) for part in parts]
        at = 0
        for part in parts:
            share = to.sliced(axis, at, at + part.dims[axis])
            self._add(Map(share, "a", (part,)), part)
            at += part.dims[axis]
        return to

    def linear(self, node: Any) -> View:
        x, number, size = node.args
        of = self._stored(self._view(x))
        if of.token is None or of.token != len(of.dims) - 2 or of.size != of.dims[-1]:
            raise NotCaptured("has a linear layer over something else than tokens")
        dims, token = dims_of(node)
        to = self._array(size, of.array.level + 1, False, STORED)
        self._stage(of.array.level + 1).linears.append(Linear(number, of.array, to))
        return to.whole(dims, token)

    def attend(self, node: Any) -> View:
        if node.args[3] is not None:
            raise NotCaptured("attends with sinks")
        query, key, value = (self._stored(self._view(one)) for one in node.args[:3])
        (heads, size), (kv_heads, _) = (query.dims[1], query.dims[3]), (key.dims[1], key.dims[3])
        if not key.dims == value.dims == (1, kv_heads, 1, size) or heads % kv_heads or query.token != 2:
            raise NotCaptured("attends with keys and values of different sizes")
        level = max(view.array.level for view in (query, key, value)) + 1
        for view in (query, key, value):
            view.array.needed(level - 1, stored=True)
        to = self._array(heads * size, level, False, STORED)
        self._stage(level).attention = Attention(query, key, value, to, heads, kv_heads, size)
        return to.whole((1, 1, heads, size), 1)

    def _stage(self, level: int) -> Stage:
        """Return the stage before `level`, creating stages up to `level`."""
        while len(self._stages) <= level:
            self._stages.append(Stage())
        return self._stages[level - 1]

    def reshaped(self, node: Any) -> View:
        view = self._view(node.args[0])
        dims, token = dims_of(node)
        if (view.token is None) != (token is None):
            raise NotCaptured("makes tokens of something else")
        if view.token is not None and token is not None and prod(view.dims[: view.token]) != prod(dims[:token]):
            raise NotCaptured("mixes tokens with something else")
        if not view.contiguous:
            view = self._copied(view)
        return view.array.whole(dims, token, view.offset)


def _changes_something(node: Any) -> bool:
    """Return whether a node writes to its inputs: the graph does not say what else reads those."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _mapped(expression: str, operands: int = 1) -> Callable[[_Reader, Any], Any]:
    return lambda reader, node: reader.map(node, expression, *node.args[:operands])


def _gelu(reader: _Reader, node: Any) -> View:
    exact = node.kwargs.get("approximate", "none") == "none"
    return reader.map(node, "gelu(a)" if exact else "gelu_tanh(a)", node.args[0])


OPERATORS: dict[str, Callable[[_Reader, Any], Any]] = {
    "ragspec.linear.default": _Reader.linear,
    "ragspec.attend.default": _Reader.attend,
    "add.Tensor": lambda reader, node: reader.plus(node, "+"),
    "sub.Tensor": lambda reader, node: reader.plus(node, "-"),
    "mul.Tensor": _mapped("a * b", 2),
    "div.Tensor": _mapped("a / b", 2),
    "maximum.default": _mapped("larger(a, b)", 2),
    "minimum.default": _mapped("smaller(a, b)", 2),
    "neg.default": _mapped("-a"),
    "abs.default": _mapped("absolute(a)"),
    "reciprocal.default": _mapped("1.0f / a"),
    "rsub.Scalar": _Reader.minus_from,
    "rsqrt.default": _mapped("1.0f / root(a)"),
    "sqrt.default": _mapped("root(a)"),
    "exp.default": _mapped("power(a)"),
    "sigmoid.default": _mapped("sigmoid(a)"),
    "silu.default": _mapped("silu(a)"),
    "tanh.default": _mapped("hyperbolic(a)"),
    "relu.default": _mapped("positive(a)"),
    "gelu.default": _gelu,
    "pow.Tensor_Scalar": _Reader.pow,
    "mean.dim": lambda reader, node: reader.sum(node, mean=True),
    "sum.dim_IntList": lambda reader, node: reader.sum(node, mean=False),
    "native_layer_norm.default": _Reader.layer_norm,
    "cat.default": _Reader.cat,
    "stack.default": lambda reader, node: reader.cat(node, stacked=True),
    "view.default": _Reader.reshaped,
    "_unsafe_view.default": _Reader.reshaped,
    "reshape.default": _Reader.reshaped,
}
