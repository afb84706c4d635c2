"""Operators of a graph that compute nothing: the same numbers, in another order or fewer of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ragspec.engine.capture import NotCaptured
from ragspec.engine.native.program import View


def name_of(node: Any) -> str:
    """Return what a node does, as torch calls it."""
    return str(node.target).removeprefix("aten.")


def dims_of(node: Any) -> tuple[tuple[int, ...], int | None]:
    """Return a node's sizes, 1 where the tokens are, and which axis that is."""
    shape = node.meta["val"].shape
    tokens = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
    if len(tokens) > 1 or any(not shape[axis].node.expr.is_symbol for axis in tokens):
        raise NotCaptured("computes with numbers of tokens")
    dims = tuple(1 if axis in tokens else int(size) for axis, size in enumerate(shape))
    return dims, tokens[0] if tokens else None


def _axis(view: View, axis: int, what: str) -> int:
    """Return an axis counted from the front. what: would be done to the tokens, if it were theirs."""
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
