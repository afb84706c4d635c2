"""Turn a program (program.py) into C++: one function per layer, whose threads synchronise only between stages.

    void layer(const Call&, const Layer* linears, const float* const* own)

layer.py builds and calls it. Limit: a token's local numbers are on a thread's stack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from math import prod

from ragspec.engine.model.layer_graph import NotCaptured
from ragspec.engine.native.program import (
    GIVEN,
    LOCAL,
    OWN,
    RESULT,
    STORED,
    Array,
    Attention,
    LayerNorm,
    Map,
    Program,
    Stage,
    Statement,
    Sum,
    View,
)

STACK = 1 << 17  # most numbers on a thread's stack, for a stage and for what is computed once
HEAD = """#include "rowwise.h"
#include "layer.h"

namespace {

void layer(const Call& call, const Layer* linears, const float* const* own) {
    const int64_t tokens = call.tokens;
"""
TAIL = """}

}  // namespace

extern "C" void ragspec_layer(const Call* call, const Layer* linears, const float* const* own) {
#pragma omp parallel num_threads(call->threads)
    layer(*call, linears, own);
}
"""
NAMES = {OWN: "own", GIVEN: "given", LOCAL: "local", STORED: "stored", RESULT: "result"}


def source_of(program: Program) -> tuple[str, int]:
    """Return the program's C++, and the scratch numbers that it needs per token. Raises NotCaptured."""
    places, scratch = _places(program)
    lines = ["call.took(-1);", *_pointers(program, places)]
    lines += chain.from_iterable(_statement(each) for each in program.once)
    for number, stage in enumerate(program.stages):
        lines += _stage(number, stage)
    return HEAD + "".join(f"    {line}\n" for line in lines) + TAIL, scratch


def _places(program: Program) -> tuple[dict[Array, int], int]:
    """Return each stored array's offset in the scratch, per token, and the scratch size; space is reused."""
    places: dict[Array, int] = {}
    for array in sorted(program.stored, key=lambda each: each.level):
        taken = sorted(
            (place, place + other.size)
            for other, place in places.items()
            if other.last >= _written(array) and _written(other) <= array.last
        )
        at = 0
        for first, last in taken:
            if at + array.size <= first:
                break
            at = max(at, last)
        places[array] = at
    return places, max((at + array.size for array, at in places.items()), default=0)


def _written(array: Array) -> int:
    """Return the stage that writes an array: outputs of linear layers and attention are written one stage earlier."""
    return max(0, array.level - 1)


def _pointers(program: Program, places: dict[Array, int]) -> Iterator[str]:
    for array, at in places.items():
        yield f"float* const stored{array.number} = call.scratch + {at} * tokens;"
    shared = {each.to.array for each in program.once}
    _check(shared)
    for array in sorted(shared, key=lambda each: each.number):
        yield f"alignas(64) float local{array.number}[{array.size}];"


def _check(arrays: Collection[Array]) -> None:
    """Raise NotCaptured if arrays take too much of a stack."""
    if sum(array.size for array in arrays) > STACK:
        raise NotCaptured("has more numbers for each token than a stack holds")


def _stage(number: int, stage: Stage) -> Iterator[str]:
    if stage.statements:
        yield "#pragma omp for schedule(static)"
        yield "for (int64_t t = 0; t < tokens; t++) {"
        arrays = {each.to.array for each in stage.statements}
        local = sorted((array for array in arrays if array.kind == LOCAL), key=lambda each: each.number)
        _check(local)
        for array in local:
            yield f"    alignas(64) float local{array.number}[{array.size}];"
        yield from (f"    {line}" for each in stage.statements for line in _statement(each))
        yield "}"
    yield f"call.took({2 * number});"
    for each in stage.linears:
        yield f"multiply_layer(linears[{each.number}], {_array(each.of)}, tokens, {_array(each.to)});"
    if stage.attention is not None:
        yield from _attention(stage.attention)
    elif stage.linears:
        yield "#pragma omp barrier"
    yield f"call.took({2 * number + 1});"


def _attention(attention: Attention) -> Iterator[str]:
    query, key, value = (_array(each.array) for each in (attention.query, attention.key, attention.value))
    shape = f"{attention.heads}, {attention.kv_heads}"
    yield f"attend_layer(call, {query}, {key}, {value}, {shape}, {_array(attention.to)});"


def _array(array: Array) -> str:
    """Return the name of an array of all tokens."""
    return f"{NAMES[array.kind]}{array.number}"


def _at(view: View, index: str) -> str:
    """Return the address of a token's numbers in a view. index: added to it."""
    array = view.array
    offset = f" + {view.offset}" if view.offset else ""
    if array.kind == OWN:
        where = f"own[{array.number}]"
    elif array.kind in (GIVEN, RESULT):
        row = "" if array.shared else f" + t * {array.size}"
        where = f"call.{NAMES[array.kind]}[{array.number}]{row}"
    elif array.kind == STORED:
        where = f"{_array(array)} + t * {array.size}"
    else:
        where = _array(array)
    return f"{where}{offset}{index}"


def _statement(statement: Statement) -> Iterator[str]:
    if isinstance(statement, Map):
        yield from _map(statement)
    elif isinstance(statement, Sum):
        yield from _rows(statement.of, statement.to, _sum(statement))
    else:
        yield from _rows(statement.of, statement.to, _layer_norm(statement))


def _sum(statement: Sum) -> str:
    row = statement.of.dims[-1]
    return f"*({{to}}) = {_literal(statement.scale)} * sum({row}, {{of}});"


def _layer_norm(statement: LayerNorm) -> str:
    weight, bias = ("nullptr" if one is None else _at(one, "") for one in (statement.weight, statement.bias))
    row = statement.of.dims[-1]
    return f"layer_norm({row}, {{to}}, {{of}}, {weight}, {bias}, {_literal(statement.epsilon)});"


def _rows(of: View, to: View, what: str) -> Iterator[str]:
    """Yield `what` for each row of `of`; the results are contiguous."""
    each = to.size // max(1, prod(of.dims[:-1]))
    found = [(size, stride) for size, stride in zip(of.dims[:-1], of.strides[:-1], strict=True) if size > 1]
    axes: Axes = []
    for axis, (size, stride) in enumerate(found):
        axes.append((size, (stride, each * prod(other for other, _ in found[axis + 1 :]))))
    index_of, index_to = (_index(axes, which) for which in (0, 1))
    yield _loops(axes) + what.format(of=_at(of, index_of), to=_at(to, index_to))


def _map(statement: Map) -> Iterator[str]:
    to = statement.to
    views = [to, *(one for one in statement.operands if isinstance(one, View))]
    axes = _merged(to.dims, [_broadcast(view, len(to.dims), to.dims) for view in views])
    inner = 1, (1,) * len(views)
    if axes and axes[-1][1][0] == 1 and all(stride in (0, 1) for stride in axes[-1][1]):
        inner = axes.pop()
    names = [chr(ord("a") + i) for i in range(len(statement.operands))]
    operands, number = [], 0
    for one in statement.operands:
        if isinstance(one, View):
            number += 1
            at = _at(one, _index(axes, number))
            operands.append(f"Along{{{at}}}" if inner[1][number] and inner[0] > 1 else f"Same{{*({at})}}")
        else:
            operands.append(f"Same{{{_literal(one)}}}")
    parameters = ", ".join(f"auto {name}" for name in names)
    function = f"[&]({parameters}) {{ return {statement.expression}; }}"
    target = _at(to, _index(axes, 0))
    yield f"{_loops(axes)}map({inner[0]}, {target}, {function}, {', '.join(operands)});"


Axes = list[tuple[int, tuple[int, ...]]]  # size, and each view's stride


def _broadcast(view: View, count: int, dims: Sequence[int]) -> list[int]:
    """Return a view's strides along `count` axes of sizes `dims`: 0 where it is broadcast."""
    missing = count - len(view.dims)
    strides = [0] * missing + list(view.strides)
    sizes = [1] * missing + list(view.dims)
    return [0 if size == 1 else stride for size, stride, _ in zip(sizes, strides, dims, strict=True)]


def _merged(dims: Sequence[int], strides: Sequence[Sequence[int]]) -> Axes:
    """Return the axes with more than one number, neighbours merged where all views allow it."""
    axes: Axes = []
    for axis, size in enumerate(dims):
        if size == 1:
            continue
        mine = tuple(each[axis] for each in strides)
        if axes and all(before == stride * size for before, stride in zip(axes[-1][1], mine, strict=True)):
            axes[-1] = axes[-1][0] * size, mine
        else:
            axes.append((size, mine))
    return axes


def _loops(axes: Axes) -> str:
    return "".join(f"for (int i{n} = 0; i{n} < {size}; i{n}++) " for n, (size, _) in enumerate(axes))


def _index(axes: Axes, which: int) -> str:
    return "".join(f" + i{n} * {strides[which]}" for n, (_, strides) in enumerate(axes) if strides[which])


def _literal(value: float) -> str:
    """Return a number as a float32 literal of C++."""
    return f"{float(value)!r}f"
