"""One forward of a Hugging Face model over packed segments, with per-token rotary frequencies where they vary.

Some models' rotary frequencies depend on the text's length (dynamic NTK, LongRoPE). transformers derives a forward's
frequencies from its largest position. When generate() answers one record alone, that is the prompt's length for every
prompt token, and each later token's own position. So the length that counts for a token is known, whatever shares the
forward: the model's rotary module is called once per length, for its tokens, as if the text were that long.
Source: transformers 5.19, modeling_rope_utils.dynamic_rope_update. Limit: a model that is spread over several devices
needs a paged cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

from ragspec.engine.backends.graphs import Capture
from ragspec.engine.backends.paged_attention import Compute
from ragspec.engine.backends.steps import PagedSteps
from ragspec.engine.kv.budget import keepable
from ragspec.engine.kv.cache import RaggedCache
from ragspec.engine.kv.paged_cache import PagedCache
from ragspec.engine.model.attention import NAME, PackedAttention, attending, register
from ragspec.engine.model.devices import devices_of, spread
from ragspec.engine.model.kv_splits import PrefixGroup
from ragspec.engine.model.layout import ForwardProfiler, Layout, Segment
from ragspec.engine.model.masks import Unsupported
from ragspec.engine.model.result import Deferred, StepResult
from ragspec.engine.model.weight_layouts import stored_bytes
from ragspec.engine.native.kernels import Kernels
from ragspec.host.waiting import Waiting
from ragspec.models.compat import (
    cache_argument,
    effective_length,
    forget,
    kind_of,
    kinds_of,
    length_dependent,
    limit_of,
    restart_length,
)


class Frequencies:
    """A model's length-dependent rotary modules, patched to work per token. layout: returns the forward's layout."""

    def __init__(self, inner: Any, layout: Callable[[], Layout | None]) -> None:
        self._layout = layout
        self._modules = length_dependent(inner)
        self.restart = restart_length(inner)
        for module in self._modules:
            module.forward = self._per_token(module, module.forward)

    @property
    def vary(self) -> bool:
        """Whether the model has such a module."""
        return bool(self._modules)

    def release(self) -> None:
        """Restore the modules' own forward."""
        for module in self._modules:
            del module.forward
            forget(module)

    def forget(self) -> None:
        """Reset the state that modules keep from transformers' own forwards."""
        for module in self._modules:
            forget(module)

    def of(self, length: int) -> Hashable:
        """Return a key of the frequencies for a text of `length` tokens; equal frequencies have equal keys."""
        return tuple(effective_length(length, kind, limit) for kind, limit in kinds_of(self._modules))

    def agree(self, base: int, other: int, tokens: int) -> bool:
        """Return whether the first `tokens` of two rows with bases `base` and `other` may be shared.

        The second row's tokens beyond its base were computed one by one.
        """
        return not self._modules or self.of(base) == self.of(other) == self.of(max(other, tokens))

    def _per_token(self, module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def per_token(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            layout = self._layout()
            if layout is None:
                return forward(x, position_ids, *args, **kwargs)
            kind, limit = kind_of(module), limit_of(module)
            effective = [effective_length(length, kind, limit) for length in layout.lengths]
            lengths = torch.tensor(effective, device=x.device)
            parts = []
            for length in sorted(set(effective)):
                chosen = (lengths == length).nonzero()[:, 0]
                # one more position, the last of a text of that length: the model chooses frequencies by it
                last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
                forget(module)
                found = forward(x, torch.cat([position_ids[..., chosen], last], -1), *args, **kwargs)
                parts.append((chosen, found))
            forget(module)
            return _join(parts, len(layout.lengths))

        return per_token


def _join(parts: list[tuple[torch.Tensor, Any]], tokens: int) -> Any:
    """Return the parts' outputs, each (..., n + 1, size) or a tuple of these, joined in packed order."""
    first = parts[0][1]
    if isinstance(first, tuple):
        return tuple(_join([(chosen, found[i]) for chosen, found in parts], tokens) for i in range(len(first)))
    whole = first.new_empty(*first.shape[:-2], tokens, first.shape[-1])
    for chosen, found in parts:
        whole[..., chosen, :] = found[..., :-1, :]
    return whole


# -- model -----------------------------------------------------------------------------------------


class Switch(Protocol):
    """A part of a model that can be switched on and off (compiled.py)."""

    def on(self) -> None: ...

    def off(self) -> None: ...


class SplitForward(Protocol):
    """Reuses what the first layers computed for some tokens (early_exit.py)."""

    def logits(
        self, segments: list[Segment], ids: Sequence[int], wanted: Sequence[int], together: Sequence[PrefixGroup]
    ) -> torch.Tensor: ...


class Model:
    """A causal model with the KV cache of its rows.

    Args:
        inner: The loaded model.
        rows: Number of rows.
        kernels: For attention over the ragged cache; None: torch's.
        paged: Computes attention over a paged cache, which the model then has.
        capture: Captures the steps over it; None: they run as they are.
        exact: Whether those steps all have one shape (backends/step_shapes.py).
    """

    def __init__(
        self,
        inner: Any,
        rows: int,
        kernels: Kernels | None = None,
        paged: Compute | None = None,
        capture: Capture | None = None,
        exact: bool = False,
    ) -> None:
        register()
        self.inner = inner
        self.devices = devices_of(inner)
        self.device = self.devices[0]
        self.spread = spread(inner)  # "" if on one device
        self._handed = cache_argument(type(inner).forward)
        self.cache: RaggedCache | PagedCache = RaggedCache(rows)
        self.steps: PagedSteps | None = None
        if paged is not None:
            self.cache = PagedCache(rows)
            weight_bytes = sum(map(stored_bytes, inner.parameters()))
            self.steps = PagedSteps(self.cache, self.device, self._step, paged, capture, weight_bytes, exact)
        self._own_attention = inner.config._attn_implementation
        self.kernels = kernels
        self.compiled: Switch | None = None  # set while compiled layers run
        self.least = 1  # minimum tokens of a forward
        self._waiting = Waiting() if self.device.type == "cpu" else nullcontext()
        self.watch: ForwardProfiler | None = None
        self.halves: SplitForward | None = None
        self._wanted: torch.Tensor | None = None  # indices whose logits the running forward needs; None: all
        self._hooks: list[Any] = []
        inner.set_attn_implementation(NAME)
        self.frequencies = Frequencies(inner, lambda: self.cache.layout)
        if paged is not None and self.frequencies.vary:
            raise Unsupported("has rotary frequencies that depend on the text's length")
        if self.spread:
            self._narrow_output_layer()
        self._spare_last_layer()

    def release(self) -> None:
        """Restore the model."""
        if self.compiled is not None:
            self.compiled.off()
        self.inner.set_attn_implementation(self._own_attention)
        self.frequencies.release()
        for hook in self._hooks:
            hook.remove()
        self.cache, self.steps = RaggedCache(0), None
        self.halves = None

    @contextmanager
    def as_it_was(self) -> Iterator[Any]:
        """Lend the model with its own attention, for transformers' own forwards."""
        compiled = self.compiled
        if compiled is not None:
            compiled.off()
        self.inner.set_attn_implementation(self._own_attention)
        self.frequencies.forget()
        try:
            yield self.inner
        finally:
            if compiled is not None:
                compiled.on()
            self.inner.set_attn_implementation(NAME)
            self.frequencies.forget()

    @property
    def computes_prompts_apart(self) -> bool:
        """Whether prompts take no room from decoding rows: a forward becomes several steps where that is sooner."""
        return self.steps is not None

    def joins(self, rows: int, tokens: int, *, drafts: bool) -> bool:
        """Return whether rows that decode are computed in a step of so many tokens of prompts (StepShapes.joins)."""
        return self.steps is not None and self.steps.joins(rows, tokens, drafts=drafts)

    def fitted(self, counts: Sequence[int]) -> list[int]:
        """Return how many tokens of each row fit beside prompts, if it has `counts` (StepShapes.fitted)."""
        return list(counts) if self.steps is None else self.steps.shapes.fitted(counts, self.cache.rows)

    @property
    def places_beside(self) -> int:
        """Places for drafts beside prompts, all of which are computed if there is a draft (StepShapes.places)."""
        return 0 if self.steps is None else self.steps.shapes.places(self.cache.rows)

    @property
    def pool(self) -> PagedCache | None:
        """The cache, if it is in blocks and cannot grow."""
        return self.cache if isinstance(self.cache, PagedCache) and self.cache.fixed else None

    def rows_of(self, rows: int, tokens: int) -> int:
        """Return how many of so many rows, each of `tokens` tokens, the cache has room for, one at least."""
        return rows if self.pool is None else min(rows, self.pool.rows_of(tokens))

    def forget_steps(self) -> None:
        """Capture steps anew, since the model's code has changed."""
        if self.steps is not None:
            self.steps.forget()

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The decoder layers, in order; empty if the model does not keep them in a list of its depth."""
        depth = self.inner.config.get_text_config().num_hidden_layers
        found = [list(each) for each in self.inner.modules() if isinstance(each, torch.nn.ModuleList)]
        deep = [layers for layers in found if layers and len(layers) == depth]
        return next((layers for layers in deep if hasattr(layers[-1], "mlp")), deep[0] if deep else [])

    def _spare_last_layer(self) -> None:
        """Let the last layer's MLP compute only tokens whose logits are needed; nothing reads the others."""
        mlp = next((getattr(layer, "mlp", None) for layer in self.layers[-1:]), None)
        if isinstance(mlp, torch.nn.Module):
            self._hooks.append(mlp.register_forward_pre_hook(self._narrow))
            self._hooks.append(mlp.register_forward_hook(self._widen))

    def _narrow_output_layer(self) -> None:
        """Narrow the output layer's input where it is; the model itself would take indices on the first device."""
        output = self.inner.get_output_embeddings()
        if output is None:
            raise Unsupported("has no output layer of its own, and is spread over several devices")
        self._hooks.append(output.register_forward_pre_hook(self._narrow))

    @property
    def narrows(self) -> bool:
        """Whether the running forward needs the logits of some tokens only."""
        return self._wanted is not None

    def _wanted_on(self, device: torch.device) -> torch.Tensor:
        """Return the wanted indices on the device of the last layer, where they stay for the rest of the forward."""
        assert self._wanted is not None
        if self._wanted.device != device:
            self._wanted = self._wanted.to(device)
        return self._wanted

    def _narrow(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._wanted is None:
            return inputs
        return inputs[0][:, self._wanted_on(inputs[0].device)], *inputs[1:]

    def _widen(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if self._wanted is None:
            return output
        if isinstance(output, tuple):  # mixtures of experts also return the router's output
            return (self._widen(module, inputs, output[0]), *output[1:])
        wanted = self._wanted_on(output.device)
        return output.new_zeros(1, self._tokens, output.shape[2]).index_copy_(1, wanted, output)

    def resize(self, rows: int) -> None:
        """Drop all rows; start with an empty cache of `rows`, in the memory that rest() kept."""
        if isinstance(self.cache, PagedCache):
            self.cache.clear(rows)
        else:
            self.cache = RaggedCache(rows, self.cache.kept)

    def rest(self) -> None:
        """Drop all rows, but keep their memory for the next ones if it is small."""
        if isinstance(self.cache, PagedCache):
            self.cache.clear(0)
            return
        memory = [*self.cache.memory(), *self.cache.kept]
        little = sum(each.nbytes for each in memory) <= keepable(self.device)
        self.cache = RaggedCache(0, memory if little else ())

    @property
    def kept_bytes(self) -> Counter[torch.device]:
        """Bytes that rest() kept, by device."""
        found = Counter[torch.device]()
        for each in self.cache.memory() if isinstance(self.cache, PagedCache) else self.cache.kept:
            found[each.device] += each.nbytes
        return found

    @torch.inference_mode()
    def logits(
        self,
        segments: list[Segment],
        token_ids: Sequence[int],
        wanted: Sequence[int],
        together: Sequence[PrefixGroup] = (),
    ) -> torch.Tensor:
        """Run the segments' tokens; return the logits, (wanted, vocab) in float32, of the packed indices `wanted`.

        Args:
            segments: Where the tokens go. Their keys and values are in the cache afterwards.
            token_ids: The tokens of all segments, in packed order.
            wanted: Packed indices.
            together: Rows with a common prefix.
        """
        if self.halves is not None:
            return self.halves.logits(segments, token_ids, wanted, together)
        return self.whole(segments, token_ids, wanted, together)

    @torch.inference_mode()
    def begin(
        self,
        segments: list[Segment],
        token_ids: Sequence[int],
        wanted: Sequence[int],
        together: Sequence[PrefixGroup] = (),
        logits: bool = True,
    ) -> StepResult:
        """Start the same on a device that computes beside the host; elsewhere it is computed once it is read.

        logits: whether they are wanted, or the best tokens alone.
        """
        if self.steps is not None and self.halves is None:
            return self.steps.begin(segments, token_ids, wanted, logits)
        return Deferred(lambda: self.logits(segments, token_ids, wanted, together))

    @torch.inference_mode()
    def begin_after(
        self,
        segments: list[Segment],
        token_ids: Sequence[int],
        wanted: Sequence[int],
        written: tuple[torch.Tensor, Sequence[int]],
    ) -> StepResult:
        """Start a step that begins with segments of one token, which an earlier step has written. Over blocks alone.

        written: that step's best tokens, and the index there of each such segment's. Their `token_ids` mean nothing.
        """
        assert self.steps is not None
        return self.steps.begin(segments, token_ids, wanted, logits=False, written=written)

    @torch.inference_mode()
    def whole(
        self,
        segments: list[Segment],
        token_ids: Sequence[int],
        wanted: Sequence[int],
        together: Sequence[PrefixGroup] = (),
        attended: int = 0,
    ) -> torch.Tensor:
        """Do the same in one forward. attended: layers before the first that attends in it."""
        if self.steps is not None:
            return self.steps.begin(segments, token_ids, wanted, logits=True).logits()
        cache = self.cache
        assert isinstance(cache, RaggedCache)
        cache.reserve(max(segment.start + segment.count for segment in segments))
        for segment in segments:
            cache.reserve_row(segment.row, segment.start, segment.start + segment.count)
        padding = max(0, self.least - len(token_ids))
        parts = cache.parts if cache.shares else None
        layout = Layout(segments, cache.slots, self.device, together, self.kernels, padding, parts)
        layout.watch = self.watch
        indices = torch.tensor(wanted, dtype=torch.long, device=self.device)
        self._tokens = len(token_ids) + padding
        self._wanted = None if len(wanted) == self._tokens else indices if wanted else indices.new_zeros(1)
        try:
            with (
                self._waiting,
                cache.forward(layout, attended),
                attending(PackedAttention(cache, layout)),
                self.watch.forward(layout) if self.watch else nullcontext(),
            ):
                packed = torch.tensor([[*token_ids, *[token_ids[0]] * padding]], device=self.device)
                return self._call(packed, layout.positions[None], indices).float()
        finally:
            self._wanted = None

    def _call(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | int) -> torch.Tensor:
        """Return the logits, (wanted, vocab), of tokens, (1, T), at positions, (1, T). wanted: 0 for all."""
        output = self.inner(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=wanted,
            **{self._handed: self.cache},
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _step(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
        """The same for a step over the paged cache. wanted: None for all tokens."""
        self._tokens, self._wanted = token_ids.shape[1], wanted
        try:
            if self.spread:  # the output layer gets what is wanted alone
                return self._call(token_ids, positions, 0).to(self.device)
            everything = torch.arange(self._tokens, device=self.device) if wanted is None else wanted
            return self._call(token_ids, positions, everything)
        finally:
            self._wanted = None
