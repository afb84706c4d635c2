"""Decoder layers as machine code: each kind is captured once and compiled by torch's inductor, which keeps the result.

Small operators (norms, rotary embedding, activations) are then a few loops in place of dozens of calls. The last layer
stays as it is: it computes only the tokens that are wanted (forward.py).
Limit: what a graph cannot show (routing by contents, frequencies by length) is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ragspec.engine.capture import Call, Graph, NotCaptured, capture, kind, own_tensors, tensors_of
from ragspec.engine.forward import Model
from ragspec.engine.layout import Segment
from ragspec.engine.masks import Rule
from ragspec.engine.operators import RUNNING, Parts

TOKENS = (41, 43, 47, 53)  # of the captured call: one that no tensor of the layer has as a size

Compile = Callable[[Graph], Callable[..., Sequence[torch.Tensor]]]


class CompiledLayers:
    """A model's layers but the last, compiled, and switched on and off. Raises NotCaptured."""

    def __init__(self, model: Model, compile_graph: Compile) -> None:
        self._model = model
        if model.frequencies.vary:
            raise NotCaptured("has rotary frequencies that depend on the text's length")
        self._layers = list(model.layers[:-1])
        if not self._layers:
            raise NotCaptured("has no list of layers")
        if any("forward" in vars(layer) for layer in self._layers):
            raise NotCaptured("has layers that something else has wrapped")
        self._forwards: list[Callable[..., Any]] = []
        functions: dict[tuple[Any, ...], tuple[Graph, Callable[..., Any]]] = {}
        for layer, (call, tokens) in zip(self._layers, _calls(model, self._layers), strict=True):
            what = kind(layer)
            if what not in functions:
                graph = capture(layer, call, tokens)
                functions[what] = graph, compile_graph(graph)
            self._forwards.append(_forward(layer, *functions[what], call))

    def on(self) -> None:
        """Let the layers run compiled."""
        self._model.least = 2  # as they were captured
        self._model.compiled = self
        for layer, forward in zip(self._layers, self._forwards, strict=True):
            layer.forward = forward

    def off(self) -> None:
        """Let them run as they were."""
        self._model.least = 1
        self._model.compiled = None
        for layer in self._layers:
            layer.__dict__.pop("forward", None)


def inductor(graph: Graph) -> Callable[..., Sequence[torch.Tensor]]:
    """Return the graph compiled. Raises what inductor and the C++ compiler raise."""
    from torch._inductor import config, standalone_compile

    with config.patch(size_asserts=False):  # the callers are ours
        return standalone_compile(graph.module, graph.examples, dynamic_shapes="from_graph")


def _forward(
    layer: torch.nn.Module, graph: Graph, function: Callable[..., Sequence[torch.Tensor]], example: Call
) -> Callable[..., Any]:
    """Return what stands in for `layer.forward`: the function of its kind, with the layer's own tensors and parts."""
    names = {id(module): name for name, module in graph.layer.named_modules()}
    parts = Parts(graph.parts.attends, [layer.get_submodule(names[id(one)]) for one in graph.parts.linears])
    own = [tensor.detach() for tensor in own_tensors(layer).values()]
    expected = len(tensors_of(example))
    original = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = tensors_of((args, kwargs))
        if len(given) != expected:  # called in a way that was not captured
            return original(*args, **kwargs)
        parts.mask = next((one for one in (*args, *kwargs.values()) if isinstance(one, Rule)), None)
        token = RUNNING.set(parts)
        try:
            results = function(*own, *given)
        finally:
            RUNNING.reset(token)
        return results[0] if graph.whole else tuple(results)

    return forward


def _calls(model: Model, layers: Sequence[torch.nn.Module]) -> list[tuple[Call, int]]:
    """Return how each layer is called in a forward, and with how many tokens."""
    taken = {size for layer in layers for tensor in own_tensors(layer).values() for size in tensor.shape}
    tokens = next((tokens for tokens in TOKENS if tokens not in taken), 0)
    if not tokens:
        raise NotCaptured("has sizes that a number of tokens is not told from")
    calls: dict[int, Call] = {}

    def note(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[id(layer)] = args, dict(kwargs)

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        model.logits([Segment(0, 0, tokens)], [1] * tokens, [0])
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != len(layers):
        raise NotCaptured("does not call all of its layers")
    return [(calls[id(layer)], tokens) for layer in layers]
