"""Compiled decoder layers: each kind is captured once, then run by our own kernels or by torch's inductor.

On CPUs a layer is one call of our kernels (native/layer.py). Elsewhere, and where those cannot, inductor fuses small
operators (norms, rotary embedding, activations) into a few loops instead of dozens of calls. Layers are compiled if the
work ahead earns it, and kept if they measure faster. Limit: what a graph cannot express (routing by content,
frequencies by length) is not compiled.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ragspec.engine.model.forward import Model
from ragspec.engine.model.layer_graph import (
    RUNNING,
    Call,
    Graph,
    NotCaptured,
    Parts,
    capture,
    kind,
    own_tensors,
    tensors_of,
)
from ragspec.engine.model.layout import Segment
from ragspec.engine.model.masks import MaskRule
from ragspec.engine.model.self_check import differs, relative, token_ids
from ragspec.engine.model.weight_layouts import FEW, one_thread
from ragspec.engine.native.layer import Builder
from ragspec.errors import flat
from ragspec.host.cache import JsonCache, cache_dir
from ragspec.host.compiler import Unbuilt
from ragspec.host.machine import cpu_features
from ragspec.models.compat import tolerance
from ragspec.models.resolve import context_length

log = logging.getLogger(__name__)
TOKENS = (41, 43, 47, 53)  # of the captured call: the first that is no size of a tensor of the layer

Tensors = Sequence[torch.Tensor]
Run = Callable[[Tensors, MaskRule | None], Sequence[torch.Tensor] | None]  # None: run the layer itself
Bind = Callable[[Parts, Tensors, int | None], Run]  # of a layer's parts, own tensors, and number in the cache
Compile = Callable[[Graph], Bind]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """How a forward calls a layer. number: the cache layer that it writes; None if it writes none, or several."""

    call: Call
    tokens: int
    number: int | None


class CompiledLayers:
    """A model's compiled layers, which can be switched on and off. least: minimum tokens of a forward.

    Layers of a kind that cannot be compiled stay as they are, and so does the last layer in forwards in which it
    computes only some tokens. If none can be compiled, raises NotCaptured, or what capturing and `compile_graph` raise.
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

    def _compile(self, layer: torch.nn.Module, called: LayerCall, compile_graph: Compile) -> None:
        """Compile the layer's kind, unless that was tried before, and build the layer's forward from it."""
        what = kind(layer)
        try:
            if what not in self._kinds:
                graph = capture(layer, called.call, called.tokens)
                self._kinds[what] = graph, compile_graph(graph)
            found = self._kinds[what]
            if not isinstance(found, Exception):
                self._forwards[layer] = self._forward(layer, *found, called)
        except Exception as error:  # the layer's code and the compiler may raise anything; it then runs uncompiled
            log.debug("a kind of layers is not compiled", exc_info=error)
            self._kinds[what] = error

    def on(self) -> None:
        """Run the layers compiled."""
        self._model.least = self._least
        self._model.compiled = self
        for layer, forward in self._forwards.items():
            layer.forward = forward
        self._model.forget_steps()

    def off(self) -> None:
        """Run the layers as they were."""
        self._model.least = 1
        self._model.compiled = None
        for layer in self._forwards:
            layer.__dict__.pop("forward", None)
        self._model.forget_steps()

    def _forward(self, layer: torch.nn.Module, graph: Graph, bind: Bind, called: LayerCall) -> Callable[..., Any]:
        """Return the replacement of `layer.forward`."""
        names = {id(module): name for name, module in graph.layer.named_modules()}
        parts = Parts(graph.parts.attends, [layer.get_submodule(names[id(one)]) for one in graph.parts.linears])
        run = bind(parts, [tensor.detach() for tensor in own_tensors(layer).values()], called.number)
        expected, last = len(tensors_of(called.call)), layer is self._layers[-1]
        original, model = layer.forward, self._model

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = tensors_of((args, kwargs))
            if len(given) != expected or (last and model.narrows):  # a kind of call that was not captured
                return original(*args, **kwargs)
            results = run(given, next((one for one in (*args, *kwargs.values()) if isinstance(one, MaskRule)), None))
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
    """Return a Bind for a function of a layer's own tensors and the given ones, such as `graph.module`."""

    def bind(parts: Parts, own: Tensors, number: int | None) -> Run:
        def run(given: Tensors, rule: MaskRule | None) -> Sequence[torch.Tensor]:
            parts.mask = rule
            token = RUNNING.set(parts)
            try:
                return function(*own, *given)
            finally:
                RUNNING.reset(token)

        return run

    return bind


def _calls(model: Model, layers: Sequence[torch.nn.Module]) -> list[LayerCall]:
    """Return how a forward calls each layer."""
    taken = {size for layer in layers for tensor in own_tensors(layer).values() for size in tensor.shape}
    tokens = next((tokens for tokens in TOKENS if tokens not in taken), 0)
    if not tokens:
        raise NotCaptured("has sizes from which the number of tokens cannot be derived")
    calls: dict[int, LayerCall] = {}

    def begins(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[id(layer)] = LayerCall((args, dict(kwargs)), tokens, model.cache.next)

    def ends(layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        called = calls[id(layer)]
        if called.number is not None and model.cache.next != called.number + 1:
            calls[id(layer)] = replace(called, number=None)

    hooks: list[Any] = [layer.register_forward_pre_hook(begins, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(ends) for layer in layers]
    try:
        with model.steps.unpadded() if model.steps else nullcontext():
            model.logits([Segment(0, 0, tokens)], [1] * tokens, range(tokens))
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != len(layers):
        raise NotCaptured("does not call all of its layers")
    return [calls[id(layer)] for layer in layers]


# -- decision --------------------------------------------------------------------------------------


Wish = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class CompileBackend:
    """A way to compile layers. what: its description. seconds: to compile. gain: share of a step's time that it saves.

    Both are estimates, until measured.
    """

    name: str
    what: str
    seconds: float
    gain: float


KERNELS = CompileBackend("kernels", "layers of one call each", seconds=8.0, gain=0.2)
INDUCTOR = CompileBackend("inductor", "compiled layers", seconds=40.0, gain=0.05)
INDUCTOR_CUDA = CompileBackend("inductor", "compiled layers", seconds=20.0, gain=0.2)
GLANCES = 5  # steps that must all say that compiling pays: the first takes longer
PASSES, PATIENCE_S = 7, 2.0
SLOWER = 1.15  # ratio from which compiled layers are not used for prompts; measured only once
ROWS, REACH = 8, 64  # rows of the compared steps, and their context length
LENGTHS = (65, 512)  # tokens of the compared forwards
FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def compile_layers(
    model: Model, rows: int, tokens: int | None, wish: Wish, notes: list[str], whose: str = "the model's"
) -> None:
    """Compile the model's layers if that pays.

    Args:
        model: The model; its cache holds nothing of use afterwards.
        rows: Batch size.
        tokens: Expected output tokens of the run, None if unknown.
        wish: "on" and "off" override the decision.
        notes: Receives notes for the user.
        whose: The model's name in notes.
    """
    if model.spread:  # its layers are wrapped by accelerate's hooks
        if wish == "on":
            notes.append(f"compile: {whose} layers run uncompiled: it is {model.spread}")
        return
    rows, why = min(rows, ROWS), ""
    inductor_here = INDUCTOR_CUDA if model.device.type == "cuda" else INDUCTOR
    for way in [KERNELS, inductor_here] if model.kernels else [inductor_here]:
        layers: list[CompiledLayers] = []
        try:
            if wish == "off" or (wish == "auto" and not _earned(model, way, rows, tokens)):
                continue
            notes.append(f"compile: {whose} {_compile(model, way, rows, wish == 'on', layers, notes)}")
            return
        except (NotCaptured, Unbuilt) as reason:
            why = str(reason)
        except Exception as error:  # compilers and models may raise anything; the layers then run uncompiled
            log.debug("the layers do not compile", exc_info=error)
            why = f"does not compile ({type(error).__name__}: {flat(error, 160)})"
        for each in layers:
            each.off()
        model.resize(rows)  # a forward may have stopped halfway through growing the cache
        log.info("%s: the model %s", way.name, why)
    if why:
        notes.append(f"compile: {whose} layers run uncompiled: it {why}")


def _compile(
    model: Model, way: CompileBackend, rows: int, wished: bool, made: list[CompiledLayers], notes: list[str]
) -> str:
    """Compile the layers and return the outcome. made: receives the layers once they exist. Raises NotCaptured."""
    check_folder(way, notes)
    started = time.perf_counter()
    builder = Builder(model)
    layers = CompiledLayers(model, builder) if way is KERNELS else CompiledLayers(model, inductor, least=2)
    made.append(layers)
    layers.on()
    why, prompts = _compared_at_length(model, layers)
    if why := differs(model, tolerance(model.inner.dtype)) or why:
        raise NotCaptured(why)
    if prompts > SLOWER:
        builder.most = FEW
    seconds, ratio = time.perf_counter() - started, _ratio(model, rows, layers)
    if wished or ratio < 1:
        layers.on()
    outcome = "kept" if wished or ratio < 1 else "not kept"
    found = {"seconds": round(seconds, 1), "gain": round(1 - ratio, 3) if ratio < 1 else way.gain}
    JsonCache(way.name).write(found, *_depends(model))
    return f"{way.what} take {ratio:.2f} of the time of a step: {outcome} ({seconds:.0f} s to compile)"


def _compared_at_length(model: Model, layers: CompiledLayers) -> tuple[str, float]:
    """Return how compiled layers differ in forwards larger than the self-check's, "" if not, and their time ratio.

    The ratio is that of the largest forward. The layers are on afterwards.
    """
    share = 1.0
    for tokens in [each for each in LENGTHS if each <= _longest(model)]:
        ids = token_ids(model.inner, tokens)
        found, seconds = [], []
        for switch in (layers.off, layers.on):
            switch()
            model.resize(1)
            started = time.perf_counter()
            found.append(model.logits([Segment(0, 0, tokens, alone=True)], ids, range(tokens - 8, tokens)))
            seconds.append(time.perf_counter() - started)
        error, share = relative(found[1], found[0]), seconds[1] / seconds[0]
        if not error <= tolerance(model.inner.dtype):
            why = f"computes different logits for {tokens} tokens when compiled (off by {error:.1e} of the largest)"
            return why, share
    return "", share


def _earned(model: Model, way: CompileBackend, rows: int, tokens: int | None) -> bool:
    """Return whether compiling should save more time than it takes, by earlier measurements if there are any."""
    if tokens is None:
        return False
    seconds, gain = way.seconds, way.gain
    with suppress(KeyError, TypeError, ValueError):  # nothing is known, or the file says something else
        found = JsonCache(way.name).read(*_depends(model))
        seconds, gain = float(found["seconds"]), float(found["gain"])
    share = gain * tokens / rows  # steps' worth of time that is saved over the run
    looks = all(share * min(_steps(model, rows, 1)) > seconds for _ in range(GLANCES))
    return looks and share * _undisturbed(model, rows) > seconds


def _undisturbed(model: Model, rows: int) -> float:
    """Return an upper bound of a step's seconds on an idle machine: the processor time of one thread.

    With several threads, waiting for each other on a busy machine counts as processor time too.
    """
    with one_thread():
        worked = time.process_time()
        _steps(model, rows, 1)
        return time.process_time() - worked


def _depends(model: Model) -> list[str]:
    """Return what the speed of a model's compiled layers depends on."""
    return [model.inner.config.to_json_string(), str(model.device), cpu_features(), str(torch.get_num_threads())]


def check_folder(way: CompileBackend, notes: list[str]) -> None:
    """Note a cache that cannot be written; have inductor use it, unless the user chose another."""
    folder = cache_dir() / way.name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        notes.append(f"compile: {folder} is not writable; compiled code is not cached")
    elif way is INDUCTOR:
        os.environ.setdefault(FOLDER, str(folder))


def _ratio(model: Model, rows: int, layers: CompiledLayers) -> float:
    """Return a step's time with compiled layers as a share of that without, measured alternately."""
    ratios: list[float] = []
    started = time.perf_counter()
    while len(ratios) < PASSES and (not ratios or time.perf_counter() - started < PATIENCE_S):
        layers.off()
        without = min(_steps(model, rows, 2))
        layers.on()
        ratios.append(min(_steps(model, rows, 2)) / without)
    layers.off()
    return statistics.median(ratios)


def _longest(model: Model) -> int:
    """Return the model's context length."""
    return context_length(model.inner.config) or LENGTHS[-1]


def _steps(model: Model, rows: int, times: int) -> Sequence[float]:
    """Return the seconds of `times` steps of `rows` rows."""
    if model.cache.rows < rows:
        model.resize(rows)
    segments = [Segment(row, min(REACH, _longest(model) - 1), 1) for row in range(rows)]
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        model.logits(segments, [1] * rows, range(rows)).argmax(-1).tolist()
        taken.append(time.perf_counter() - started)
    return taken
