"""One forward of a Hugging Face model over packed segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

from ragspec.engine.attention import NAME, register
from ragspec.engine.cache import RaggedCache
from ragspec.engine.capacity import keepable
from ragspec.engine.frequencies import Frequencies
from ragspec.engine.layout import Layout, Segment, Watch
from ragspec.engine.native.kernels import Kernels
from ragspec.engine.pieces import Together
from ragspec.models.forwards import cache_word


class Switch(Protocol):
    """Something about a model that can be on or off (compiled.py)."""

    def on(self) -> None: ...

    def off(self) -> None: ...


class Halves(Protocol):
    """Who knows of some tokens what the first layers computed (halves.py)."""

    def logits(
        self, segments: list[Segment], ids: Sequence[int], wanted: Sequence[int], together: Sequence[Together]
    ) -> torch.Tensor: ...


class Model:
    """A causal model, with the keys and values of its rows. kernels: what attention may be computed with."""

    def __init__(self, inner: Any, rows: int, kernels: Kernels | None = None) -> None:
        register()
        self.inner = inner
        self.device: torch.device = inner.device
        self._handed = cache_word(type(inner).forward)
        self.cache = RaggedCache(rows)
        self._own_attention = inner.config._attn_implementation
        self.kernels = kernels
        self.compiled: Switch | None = None  # while compiled layers run
        self.least = 1  # tokens of a forward
        self.watch: Watch | None = None
        self.halves: Halves | None = None
        self._wanted: torch.Tensor | None = None  # of the running forward
        self._hooks: list[Any] = []
        inner.set_attn_implementation(NAME)
        self.frequencies = Frequencies(inner, lambda: self.cache.layout)
        self._spare_last_layer()

    def release(self) -> None:
        """Leave the model as it was."""
        if self.compiled is not None:
            self.compiled.off()
        self.inner.set_attn_implementation(self._own_attention)
        self.frequencies.release()
        for hook in self._hooks:
            hook.remove()
        self.cache = RaggedCache(0)
        self.halves = None

    @contextmanager
    def as_it_was(self) -> Iterator[Any]:
        """Lend the model with its own attention, for forwards of transformers' own."""
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
    def layers(self) -> list[torch.nn.Module]:
        """The decoder layers, in order; none where the model does not keep them in a list of its depth."""
        depth = self.inner.config.get_text_config().num_hidden_layers
        found = [list(each) for each in self.inner.modules() if isinstance(each, torch.nn.ModuleList)]
        deep = [layers for layers in found if layers and len(layers) == depth]
        return next((layers for layers in deep if hasattr(layers[-1], "mlp")), deep[0] if deep else [])

    def _spare_last_layer(self) -> None:
        """Let the last layer's MLP compute only tokens whose logits are wanted: nothing reads the others."""
        mlp = next((getattr(layer, "mlp", None) for layer in self.layers[-1:]), None)
        if isinstance(mlp, torch.nn.Module):
            self._hooks.append(mlp.register_forward_pre_hook(self._narrow))
            self._hooks.append(mlp.register_forward_hook(self._widen))

    @property
    def narrows(self) -> bool:
        """Whether the running forward wants the logits of some tokens only."""
        return self._wanted is not None

    def _narrow(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return inputs if self._wanted is None else (inputs[0][:, self._wanted], *inputs[1:])

    def _widen(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if self._wanted is None:
            return output
        if isinstance(output, tuple):  # mixtures of experts return their router's output too
            return (self._widen(module, inputs, output[0]), *output[1:])
        return output.new_zeros(1, self._tokens, output.shape[2]).index_copy_(1, self._wanted, output)

    def resize(self, rows: int) -> None:
        """Forget all rows; have an empty cache of `rows`, of the memory that rest() kept."""
        self.cache = RaggedCache(rows, self.cache.kept)

    def rest(self) -> None:
        """Forget all rows, but keep their memory for the next ones if it is little."""
        memory = [*self.cache.memory(), *self.cache.kept]
        little = sum(each.nbytes for each in memory) <= keepable(self.device)
        self.cache = RaggedCache(0, memory if little else ())

    @property
    def kept_bytes(self) -> int:
        """Bytes that rest() kept."""
        return sum(each.nbytes for each in self.cache.kept)

    @torch.inference_mode()
    def logits(
        self,
        segments: list[Segment],
        token_ids: Sequence[int],
        wanted: Sequence[int],
        together: Sequence[Together] = (),
    ) -> torch.Tensor:
        """Run the segments' tokens and return the logits, (wanted, vocab) in float32, of the packed indices `wanted`.

        token_ids: the tokens of all segments in packed order. Their keys and values are in the cache afterwards.
        together: rows that hold the same first tokens.
        """
        if self.halves is not None:
            return self.halves.logits(segments, token_ids, wanted, together)
        return self.whole(segments, token_ids, wanted, together)

    @torch.inference_mode()
    def whole(
        self,
        segments: list[Segment],
        token_ids: Sequence[int],
        wanted: Sequence[int],
        together: Sequence[Together] = (),
        attended: int = 0,
    ) -> torch.Tensor:
        """The same by one forward. attended: layers before the first that attends in it."""
        self.cache.reserve(max(segment.start + segment.count for segment in segments))
        padding = max(0, self.least - len(token_ids))
        layout = Layout(segments, self.cache.slots, self.device, together, self.kernels, padding, self.cache.loans)
        layout.watch = self.watch
        indices = torch.tensor(wanted, dtype=torch.long, device=self.device)
        self._tokens = len(token_ids) + padding
        self._wanted = None if len(wanted) == self._tokens else indices if wanted else indices.new_zeros(1)
        try:
            with self.cache.forward(layout, attended), self.watch.forward(layout) if self.watch else nullcontext():
                output = self.inner(
                    input_ids=torch.tensor([[*token_ids, *[token_ids[0]] * padding]], device=self.device),
                    position_ids=layout.positions[None],
                    use_cache=True,
                    logits_to_keep=indices,
                    **{self._handed: self.cache},
                )
        finally:
            self._wanted = None
        logits: torch.Tensor = output.logits[0].float()
        return logits
