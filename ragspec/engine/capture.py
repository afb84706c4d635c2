"""A model's forward as one graph of torch's operators, captured by running it once on tensors without contents.

What runs is the model's own Python, so hooks, masks and caches do as ever; attention and packed linear layers become
one operator each (operators.py). How many tokens there are, and how many logits are wanted, stays open; both are at
least 2.
Source: torch.fx.experimental.proxy_tensor.make_fx.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from ragspec.engine.forward import Model
from ragspec.engine.operators import Parts

TOKENS, WANTED = 40, 11  # of the captured forward: any two numbers that differ from the model's own sizes


class NotCaptured(Exception):
    """The forward cannot become a graph; the message completes a sentence after "it"."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured forward of token ids and positions, each (1, T), and the indices of the wanted logits, (W,).

    tensors: parameters and buffers, passed after those three. examples: all of these, without contents. conditions:
    what the sizes must satisfy beyond T, W >= 2; tokens, wanted: the symbols of these.
    """

    module: torch.fx.GraphModule
    tensors: list[torch.Tensor]
    examples: list[Any]
    parts: Parts
    conditions: list[Any]
    tokens: Any
    wanted: Any

    def holds_for(self) -> Any:
        """Return a function of T and W that says whether the graph computes a forward of these sizes."""

        @cache
        def holds(tokens: int, wanted: int) -> bool:
            sizes = {self.tokens: tokens, self.wanted: wanted}
            return all(bool(condition.subs(sizes)) for condition in self.conditions)

        return holds


@torch.no_grad()
def capture(model: Model) -> Graph:
    """Return the forward of `model` as a graph. Raises NotCaptured, and whatever the model's code raises on the way."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if model.frequencies.vary:
        raise NotCaptured("has rotary frequencies that depend on the text's length")
    named = dict(model.inner.named_parameters()) | dict(model.inner.named_buffers())
    if {tensor.device for tensor in named.values()} != {model.device}:
        raise NotCaptured("is spread over several devices")
    sizes = ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)
    ids = _open(mode, torch.zeros(1, TOKENS, dtype=torch.long, device=model.device), 1)
    wanted = _open(mode, torch.zeros(WANTED, dtype=torch.long, device=model.device), 0)
    tensors = [tensor.detach() for tensor in named.values()]
    examples = [
        ids,
        torch.empty_like(ids),
        wanted,
        *(mode.from_tensor(tensor, static_shapes=True) for tensor in tensors),
    ]
    parts = Parts()

    def forward(ids: Any, positions: Any, wanted: Any, *tensors: Any) -> Any:
        call = partial(torch.func.functional_call, model.inner, dict(zip(named, tensors, strict=True)), ())
        return model.compute(ids, positions, wanted, lambda **inputs: call(inputs))

    with parts.gathering():
        module = make_fx(forward, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    if not parts.attends:
        raise NotCaptured("attends in a way that a graph does not show")
    symbols = ids.shape[1].node.expr, wanted.shape[0].node.expr
    conditions = [guard.expr for guard in sizes.guards]
    if any(condition.free_symbols - set(symbols) for condition in conditions):
        raise NotCaptured("has sizes that depend on its contents")
    return Graph(module, tensors, examples, parts, conditions, *symbols)


def _open(mode: Any, tensor: torch.Tensor, dimension: int) -> Any:
    """Return `tensor` without contents, its size in `dimension` left open."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = [DimDynamic.DYNAMIC if at == dimension else DimDynamic.STATIC for at in range(tensor.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor, source=ConstantSource(f"open{tensor.dim()}"), symbolic_context=context)
