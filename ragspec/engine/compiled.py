"""Decoder layers as machine code: each kind is captured once, and run by our own kernels or by what torch's inductor
compiles.

On CPUs a layer is one call of our kernels (native/layer.py). Elsewhere, and where those cannot, inductor turns small
operators (norms, rotary embedding, activations) into a few loops in place of dozens of calls.
Limit: what a graph cannot show (routing by contents, frequencies by length) is not compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ragspec.engine.capture import Call, Graph, NotCaptured, capture, kind, own_tensors, tensors_of
from ragspec.engine.forward import Model
from ragspec.engine.layout import Segment
from ragspec.engine.masks import Rule
from ragspec.engine.operators import RUNNING, Parts

log = logging.getLogger(__name__)
TOKENS = (41, 43, 47, 53)  # of the captured call: one that no tensor of the layer has as a size

Tensors = Sequence[torch.Tensor]
Run = Callable[[Tensors, Rule | None], Sequence[torch.Tensor] | None]  # None: the layer itself is to compute
Bind = Callable[[Parts, Tensors, int | None], Run]  # of a layer's parts and own tensors, and its number in the cache
Compile = Callable[[Graph], Bind]


@dataclass(frozen=True, slots=True)
class Called:
    """How a forward calls a layer: with what, for how many tokens, and which layer of the cache it writes.

    number: None where it writes none, or several.
    """

    call: Call
    tokens: int
    number: int | None


class CompiledLayers:
    """A model's layers, compiled, and switched on and off. least: tokens of a forward.

    Layers of a kind that cannot be compiled stay as they are, and so does the last layer in forwards in which it
    computes some tokens only. Where none can be compiled, raises NotCaptured, or what capturing and `compile_graph` do.
    """

    def __init__(self, model: Model, compile_graph: Compile, least: int = 1) -> None:
        self._model = model
        self._least = least
        if model.frequencies.vary:
            raise NotCaptured("has rotary frequencies that depend on the text's length")
        self._layers = list(model.layers)
        if not self._layers:
            raise NotCaptured("has no list of layers")
        if any("forward" in vars(layer) for layer in self._layers):
            raise NotCaptured("has layers that something else has wrapped")
        self._forwards: dict[torch.nn.Module, Callable[..., Any]] = {}
        self._kinds: dict[tuple[Any, ...], tuple[Graph, Bind] | Exception] = {}
        for layer, called in zip(self._layers, _calls(model, self._layers), strict=True):
            self._compile(layer, called, compile_graph)
        failures = [found for found in self._kinds.values() if isinstance(found, Exception)]
        if not self._forwards:
            raise failures[0]

    def _compile(self, layer: torch.nn.Module, called: Called, compile_graph: Compile) -> None:
        """Compile a layer's kind, unless that was tried, and have the layer's forward made of it."""
        what = kind(layer)
        try:
            if what not in self._kinds:
                graph = capture(layer, called.call, called.tokens)
                self._kinds[what] = graph, compile_graph(graph)
            found = self._kinds[what]
            if not isinstance(found, Exception):
                self._forwards[layer] = self._forward(layer, *found, called)
        except Exception as error:  # whatever the layer's code and the compiler raise: it runs as it is
            log.debug("a kind of layers is not compiled", exc_info=error)
            self._kinds[what] = error

    def on(self) -> None:
        """Let the layers run compiled."""
        self._model.least = self._least
        self._model.compiled = self
        for layer, forward in self._forwards.items():
            layer.forward = forward

    def off(self) -> None:
        """Let them run as they were."""
        self._model.least = 1
        self._model.compiled = None
        for layer in self._forwards:
            layer.__dict__.pop("forward", None)

    def _forward(self, layer: torch.nn.Module, graph: Graph, bind: Bind, called: Called) -> Callable[..., Any]:
        """Return what stands in for `layer.forward`."""
        names = {id(module): name for name, module in graph.layer.named_modules()}
        parts = Parts(graph.parts.attends, [layer.get_submodule(names[id(one)]) for one in graph.parts.linears])
        run = bind(parts, [tensor.detach() for tensor in own_tensors(layer).values()], called.number)
        expected, last = len(tensors_of(called.call)), layer is self._layers[-1]
        original, model = layer.forward, self._model

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = tensors_of((args, kwargs))
            if len(given) != expected or (last and model.narrows):  # it is called in a way that was not captured
                return original(*args, **kwargs)
            results = run(given, next((one for one in (*args, *kwargs.values()) if isinstance(one, Rule)), None))
            if results is None:
                return original(*args, **kwargs)
            return results[0] if graph.whole else tuple(results)

        return forward


def inductor(graph: Graph) -> Bind:
    """Return the graph compiled by inductor. Raises NotCaptured, and what inductor and the C++ compiler raise."""
    try:
        from torch._inductor import config, standalone_compile
    except ImportError as error:
        lacking = f"needs torch._inductor.standalone_compile, which torch {torch.__version__} does not have"
        raise NotCaptured(lacking) from error
    with config.patch(size_asserts=False):  # the callers are ours
        function = standalone_compile(graph.module, graph.examples, dynamic_shapes="from_graph")
    return called_with(function)


def called_with(function: Callable[..., Sequence[torch.Tensor]]) -> Bind:
    """Return what binds layers to a function of a layer's own tensors and the given ones, as `graph.module` is."""

    def bind(parts: Parts, own: Tensors, number: int | None) -> Run:
        def run(given: Tensors, rule: Rule | None) -> Sequence[torch.Tensor]:
            parts.mask = rule
            token = RUNNING.set(parts)
            try:
                return function(*own, *given)
            finally:
                RUNNING.reset(token)

        return run

    return bind


def _calls(model: Model, layers: Sequence[torch.nn.Module]) -> list[Called]:
    """Return how each layer is called in a forward."""
    taken = {size for layer in layers for tensor in own_tensors(layer).values() for size in tensor.shape}
    tokens = next((tokens for tokens in TOKENS if tokens not in taken), 0)
    if not tokens:
        raise NotCaptured("has sizes that a number of tokens is not told from")
    calls: dict[int, Called] = {}

    def begins(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[id(layer)] = Called((args, dict(kwargs)), tokens, model.cache.next)

    def ends(layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        called = calls[id(layer)]
        if called.number is not None and model.cache.next != called.number + 1:
            calls[id(layer)] = replace(called, number=None)

    hooks: list[Any] = [layer.register_forward_pre_hook(begins, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(ends) for layer in layers]
    try:
        model.logits([Segment(0, 0, tokens)], [1] * tokens, range(tokens))
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != len(layers):
        raise NotCaptured("does not call all of its layers")
    return [calls[id(layer)] for layer in layers]
