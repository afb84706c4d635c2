"""Captured layers as single calls of our own kernels: the C++ of source.py, built, and bound to a layer's tensors.

    >>> bind = Builder(model)(graph)
    >>> run = bind(parts, own, number=0)  # number: the cache layer that it writes
    >>> run([hidden, cos, sin], None)  # the layer's results; None if this forward is not for kernels

Limit: attention under the plain causal mask; for other forwards the layer itself runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from ragspec.engine.kv.cache import RaggedCache
from ragspec.engine.model.kv_splits import KvSplits
from ragspec.engine.model.layer_graph import Graph, NotCaptured, Parts, own_tensors
from ragspec.engine.model.layout import Layout
from ragspec.engine.model.masks import MaskRule
from ragspec.engine.model.weight_layouts import SHARE, PackedLinear
from ragspec.engine.native.graph_reader import program_of
from ragspec.engine.native.kernels import KEPT, library_of
from ragspec.engine.native.program import Program
from ragspec.engine.native.source import source_of
from ragspec.host.machine import free_bytes

if TYPE_CHECKING:
    from ragspec.engine.model.forward import Model

Tensors = Sequence[torch.Tensor]
Run = Callable[[Tensors, MaskRule | None], list[torch.Tensor] | None]
Bind = Callable[[Parts, Tensors, int | None], Run]


class Call(Structure):
    """Call in layer.h."""

    _fields_ = [
        ("tokens", c_int64),
        ("threads", c_int64),
        ("given", c_void_p),
        ("result", c_void_p),
        ("scratch", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("rows", c_int64),
        ("slots", c_int64),
        ("places", c_void_p),
        ("attending", c_int64),
        ("pieces", c_void_p),
        ("entries", c_void_p),
        ("parts", c_void_p),
        ("piece_count", c_int64),
        ("merging", c_void_p),
        ("scale", c_float),
        ("cap", c_float),
        ("seconds", POINTER(c_double)),
    ]


class LinearLayer(Structure):
    """Layer in linear.h."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("k", c_int64), ("n", c_int64), ("kept", c_int64)]


class Builder:
    """Builds layers of one model. most: most tokens of a forward that they compute; None: any number."""

    def __init__(self, model: Model) -> None:
        self.most: int | None = None
        self._model = model
        self._call = Call()
        self._copied = 0  # bytes of weights copied into the kernels' layout
        self._layout: Layout | None = None  # the forward for which `_call` is filled in
        self._work: KvSplits | None = None  # its splits
        self._scratch = self._merging = _room(0)

    def __call__(self, graph: Graph) -> Bind:
        """Return a Bind for layers of the graph's kind. Raises NotCaptured and Unbuilt."""
        kernels = self._model.kernels
        if kernels is None:
            raise NotCaptured("has no kernels here")
        program = program_of(graph, len(own_tensors(graph.layer)))
        if program.attention.size != kernels.head:
            raise NotCaptured("has heads that kernels do not attend with")
        source, scratch = source_of(program)
        function = library_of(source, kernels.head).ragspec_layer
        function.argtypes, function.restype = [c_void_p, c_void_p, c_void_p], None
        return lambda *layer: self._bound(function, program, scratch, *layer)

    def _bound(
        self,
        function: Callable[..., None],
        program: Program,
        scratch: int,
        parts: Parts,
        own: Tensors,
        number: int | None,
    ) -> Run:
        if number is None:
            raise NotCaptured("has layers that share keys and values")
        attention, (scores,) = program.attention, parts.attends
        scale = attention.size**-0.5 if scores.scaling is None else scores.scaling
        linears = (LinearLayer * len(parts.linears))()
        kept = list(own)  # keeps the pointers' targets alive
        read = []
        for entry, layer in zip(linears, parts.linears, strict=True):
            assert isinstance(layer, PackedLinear)  # it is in the graph as one operator
            weight, bias = self._packed(layer), layer.bias
            entry.weight, entry.k, entry.n = weight.data_ptr(), layer.in_features, layer.out_features
            entry.bias = None if bias is None else bias.data_ptr()
            entry.kept = KEPT[weight.dtype]
            read.append(layer.in_features * layer.out_features * weight.element_size())
            kept += [weight] if bias is None else [weight, bias]
        if any(tensor.is_floating_point() and not tensor.is_contiguous() for tensor in own):
            raise NotCaptured("has weights that are not in one row")
        stages = program.shape(read)
        pointers = (c_void_p * len(own))(*(tensor.data_ptr() for tensor in own))
        call, sizes = self._call, [(array.size, array.shared, array.used) for array in program.given]
        results = [
            [None if at == view.token else size for at, size in enumerate(view.dims)] for view in program.results
        ]

        def run(given: Tensors, rule: MaskRule | None) -> list[torch.Tensor] | None:
            cache = RaggedCache.running.get(None)
            layout = None if cache is None else cache.layout
            if cache is None or layout is None or cache.next != number or not self._takes(layout, rule):
                return None
            tokens = layout.tokens + layout.padding
            pointed = (c_void_p * len(given))()
            for at, (tensor, (size, shared, used)) in enumerate(zip(given, sizes, strict=True)):
                if not used:
                    continue
                if tensor.numel() != size * (1 if shared else tokens) or not tensor.is_contiguous():
                    return None
                pointed[at] = tensor.data_ptr()
            layer = cache.layer_of(attention.kv_heads, attention.size, self._scratch)
            made = []
            for shape in results:
                made.append(self._scratch.new_empty([tokens if size is None else size for size in shape]))
            into = (c_void_p * len(made))(*(tensor.data_ptr() for tensor in made))
            self._begin(layout, scratch, attention.heads * (attention.size + 2))
            seconds = (c_double * (2 * len(program.stages) + 1))() if layout.watch else None
            call.given, call.result = ctypes.addressof(pointed), ctypes.addressof(into)
            call.keys, call.values = layer.keys.data_ptr(), layer.values.data_ptr()
            call.rows, call.slots, call.scale, call.cap = cache.rows, cache.slots, scale, scores.cap or 0.0
            call.seconds = seconds
            function(byref(call), linears, pointers)
            if layout.watch and seconds:
                layout.watch.layer(layout, stages, list(seconds)[2::2])
            return made

        run.__dict__["kept"] = kept
        return run

    def _packed(self, layer: PackedLinear) -> torch.Tensor:
        """Return a weight in our kernels' layout; as one more copy if it has another, and memory allows."""
        if layer.native is not None:
            return layer.native
        self._copied += layer.in_features * layer.out_features * 4
        if self._copied > SHARE * free_bytes():
            raise NotCaptured("has linear layers in another layout, and there is not enough memory for a second copy")
        assert self._model.kernels is not None
        return self._model.kernels.pack(layer.weight)

    def _takes(self, layout: Layout, rule: MaskRule | None) -> bool:
        """Return whether the kernels can run a layer in this forward."""
        if layout.kernels is None or (self.most is not None and layout.tokens > self.most):
            return False
        return layout.causal(rule)

    def _begin(self, layout: Layout, scratch: int, merging: int) -> None:
        """Fill in what all layers of a forward share. scratch, merging: numbers per token, and per partial result."""
        call, work = self._call, layout.pieces
        tokens = layout.tokens + layout.padding
        if self._scratch.numel() < scratch * tokens:
            self._scratch = _room(scratch * tokens)
            call.scratch = self._scratch.data_ptr()
        if self._merging.numel() < merging * work.count:
            self._merging = _room(merging * work.count)
            call.merging = self._merging.data_ptr()
        if layout is self._layout and work is self._work:
            return
        self._layout, self._work = layout, work
        call.tokens, call.threads, call.attending = tokens, torch.get_num_threads(), layout.tokens
        call.places, call.parts = layout.writes.data_ptr(), work.parts.data_ptr()
        call.pieces, call.entries = work.pieces.data_ptr(), work.entries.data_ptr()
        call.piece_count = len(work.pieces)


def _room(count: int) -> torch.Tensor:
    """Return an uninitialised float32 array on the CPU, independent of torch's defaults."""
    return torch.empty(count, dtype=torch.float32, device="cpu")
