"""A decoder layer as one graph of torch operators, captured by running it once on fake tensors.

The layer's own Python runs, so masks and caches work as ever; attention and packed linear layers become one operator
each. An operator takes only tensors and numbers; whatever else a call needs is in the layer's Parts, by number. The
number of tokens stays symbolic, from two on. Source: torch.fx.experimental.proxy_tensor.make_fx.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, Protocol

import torch
from torch import library

CAPTURING: ContextVar[Parts | None] = ContextVar("CAPTURING", default=None)  # parts of the capture in progress
RUNNING: ContextVar[Parts] = ContextVar("RUNNING")  # parts of the running layer


class Attend(Protocol):
    """A layer's attention (attention.py)."""

    @property
    def scaling(self) -> float | None: ...

    @property
    def cap(self) -> float | None: ...

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, rule: Any
    ) -> torch.Tensor: ...


@dataclass(slots=True)
class Parts:
    """What the operators of one layer refer to, by number. mask: of the layer's current call."""

    attends: list[Attend] = field(default_factory=list)
    linears: list[torch.nn.Module] = field(default_factory=list)
    mask: Any = None

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Collect a layer's parts here, with operators in their place in the graph."""
        token = CAPTURING.set(self)
        try:
            yield
        finally:
            CAPTURING.reset(token)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any, do: Attend) -> Any:
        """Add a call of `do` to the graph being captured."""
        self.attends.append(do)
        return torch.ops.ragspec.attend(query, key, value, sinks, len(self.attends) - 1)

    def linear(self, x: torch.Tensor, layer: torch.nn.Module, size: int) -> torch.Tensor:
        """Add a call of `layer`, which returns `size` features, to the graph being captured."""
        self.linears.append(layer)
        result: torch.Tensor = torch.ops.ragspec.linear(x, len(self.linears) - 1, size)
        return result


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, number: int
) -> torch.Tensor:
    parts = RUNNING.get()
    return parts.attends[number](query, key, value, sinks, parts.mask)


def _attend_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, number: int
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _linear(x: torch.Tensor, number: int, size: int) -> torch.Tensor:
    result: torch.Tensor = RUNNING.get().linears[number](x)
    return result


def _linear_shape(x: torch.Tensor, number: int, size: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], size)


_library: Any = library.Library("ragspec", "DEF")  # type: ignore[no-untyped-call]
for _name, _arguments, _does, _shape in (
    ("attend", "Tensor query, Tensor key, Tensor value, Tensor? sinks, int number", _attend, _attend_shape),
    ("linear", "Tensor x, int number, int size", _linear, _linear_shape),
):
    _library.define(f"{_name}({_arguments}) -> Tensor")
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _does, _key)
    library.register_fake(f"ragspec::{_name}", _shape, lib=_library)


# -- capture ---------------------------------------------------------------------------------------
Call = tuple[tuple[Any, ...], Mapping[str, Any]]  # positional and keyword arguments


class NotCaptured(Exception):
    """The layer cannot become a graph; the message completes a sentence after "it"."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured layer. Its module takes the layer's own tensors, then those of the call, and returns a list.

    layer: the captured one. examples: all tensors, fake. whole: whether the layer returns a single tensor.
    """

    layer: torch.nn.Module
    module: torch.fx.GraphModule
    examples: list[Any]
    parts: Parts
    whole: bool


def own_tensors(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a layer's parameters and buffers."""
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


def tensors_of(call: Call) -> list[torch.Tensor]:
    """Return the tensors among a call's arguments, including those in tuples and lists, in a fixed order."""
    found: list[torch.Tensor] = []
    for value in (*call[0], *call[1].values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += [one for one in value if isinstance(one, torch.Tensor)]
    return found


@torch.no_grad()
def capture(layer: torch.nn.Module, call: Call, tokens: int) -> Graph:
    """Return `layer` as a graph, captured from a call with `tokens` tokens; no other size may equal that.

    Raises NotCaptured, and whatever the layer's code raises.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sizes = ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)
    own = own_tensors(layer)
    given = [_open(mode, tensor, tokens, number) for number, tensor in enumerate(tensors_of(call))]
    examples = [*(mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in own.values()), *given]
    parts, whole = Parts(), True

    def forward(*tensors: Any) -> list[Any]:
        nonlocal whole
        mine = dict(zip(own, tensors, strict=False))
        args, kwargs = _filled(call, tensors[len(own) :])
        result = torch.func.functional_call(layer, mine, args, dict(kwargs))
        whole = isinstance(result, torch.Tensor)
        results = [result] if whole else list(result)
        if not all(isinstance(one, torch.Tensor) for one in results):
            raise NotCaptured("returns more than tensors")
        return results

    with parts.gathering(), _hushed():
        module = make_fx(forward, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    if len(parts.attends) != 1:
        raise NotCaptured("attends in a way that a graph does not show")
    if any(node.op == "get_attr" for node in module.graph.nodes):
        raise NotCaptured("keeps tensors where a graph does not see them change")
    if sizes.guards:
        raise NotCaptured("computes otherwise by the number of tokens")
    return Graph(layer, module, examples, parts, whole)


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep torch from logging tracebacks of what it cannot trace; the exception says it."""
    logger = getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _filled(call: Call, tensors: Sequence[Any]) -> Call:
    """Return the call with `tensors` in place of its own."""
    left = iter(tensors)

    def fill(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(left)
        if isinstance(value, tuple | list):
            return type(value)([next(left) if isinstance(one, torch.Tensor) else one for one in value])
        return value

    args = tuple(fill(value) for value in call[0])
    return args, {name: fill(value) for name, value in call[1].items()}


def _open(mode: Any, tensor: torch.Tensor, tokens: int, number: int) -> Any:
    """Return a fake of `tensor`, with each size of `tokens` symbolic."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = [DimDynamic.DUCK if size == tokens else DimDynamic.STATIC for size in tensor.shape]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor.detach(), source=ConstantSource(f"given{number}"), symbolic_context=context)


def kind(layer: torch.nn.Module) -> tuple[Any, ...]:
    """Return what layers with equal graphs have in common: classes, settings, and shapes of their tensors."""
    plain = (bool, int, float, str, type(None))
    settings = [
        (name, type(module).__qualname__, key, value)
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, plain) and key != "layer_idx"
    ]
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in own_tensors(layer).items()]
    return (*settings, *shapes)
