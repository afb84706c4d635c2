"""One forward of a Hugging Face model over packed segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ragspec.engine.attention import NAME, register
from ragspec.engine.cache import RaggedCache
from ragspec.engine.frequencies import Frequencies
from ragspec.engine.layout import Layout, Segment
from ragspec.engine.native.library import Kernels
from ragspec.engine.pieces import Together


class Compiled(Protocol):
    """A forward that computes what the model's own computes."""

    def takes(self, tokens: int, wanted: int) -> bool:
        """Return whether it can compute a forward of these sizes."""

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return what Model.compute returns for the same tensors."""


class Model:
    """A causal model, with the keys and values of its rows. kernels: what attention may be computed with."""

    def __init__(self, inner: Any, rows: int, kernels: Kernels | None = None) -> None:
        register()
        self.inner = inner
        self.device: torch.device = inner.device
        self.cache = RaggedCache(rows)
        self._own_attention = inner.config._attn_implementation
        self.kernels = kernels
        self.compiled: Compiled | None = None  # runs in place of `inner`, where it can
        self._wanted: torch.Tensor | None = None  # of the running forward
        self._hooks: list[Any] = []
        inner.set_attn_implementation(NAME)
        self.frequencies = Frequencies(inner, lambda: self.cache.layout)
        self._spare_last_layer()

    def release(self) -> None:
        """Leave the model as it was."""
        self.inner.set_attn_implementation(self._own_attention)
        self.frequencies.release()
        for hook in self._hooks:
            hook.remove()
        self.cache = RaggedCache(0)

    @contextmanager
    def as_it_was(self) -> Iterator[Any]:
        """Lend the model with its own attention, for forwards of transformers' own."""
        self.inner.set_attn_implementation(self._own_attention)
        self.frequencies.forget()
        try:
            yield self.inner
        finally:
            self.inner.set_attn_implementation(NAME)
            self.frequencies.forget()

    def _spare_last_layer(self) -> None:
        """Let the last layer's MLP compute only tokens whose logits are wanted: nothing reads the others."""
        depth = self.inner.config.get_text_config().num_hidden_layers
        for module in self.inner.modules():
            if isinstance(module, torch.nn.ModuleList) and len(module) == depth:
                mlp = getattr(module[-1], "mlp", None)
                if isinstance(mlp, torch.nn.Module):
                    self._hooks.append(mlp.register_forward_pre_hook(self._narrow))
                    self._hooks.append(mlp.register_forward_hook(self._widen))

    def _narrow(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return inputs if self._wanted is None else (inputs[0][:, self._wanted], *inputs[1:])

    def _widen(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if self._wanted is None:
            return output
        if isinstance(output, tuple):  # mixtures of experts return their router's output too
            return (self._widen(module, inputs, output[0]), *output[1:])
        return output.new_zeros(1, self._tokens, output.shape[2]).index_copy_(1, self._wanted, output)

    def resize(self, rows: int) -> None:
        """Forget all rows; have an empty cache of `rows`."""
        self.cache = RaggedCache(rows)

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
        self.cache.reserve(max(segment.start + segment.count for segment in segments))
        layout = Layout(segments, self.cache.slots, self.device, together, self.kernels)
        indices = torch.tensor(wanted, dtype=torch.long, device=self.device)
        ids = torch.tensor([token_ids], device=self.device)
        with self.cache.forward(layout):
            if self.compiled is not None and self.compiled.takes(len(token_ids), len(wanted)):
                return self.compiled(ids, layout.positions[None], indices)
            all_wanted = len(wanted) == len(token_ids)
            return self.compute(ids, layout.positions[None], indices, self.inner, narrow=not all_wanted)

    def compute(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        call: Callable[..., Any],
        narrow: bool = True,
    ) -> torch.Tensor:
        """Return the logits, (W, vocab) in float32, that `call`, the model or a stand-in, computes in one forward.

        ids, positions: (1, T). wanted: (W,), indices of tokens. narrow: not all are wanted, so some work may be spared.
        """
        self._tokens = ids.shape[1]
        if narrow:
            self._wanted = wanted if wanted.shape[0] else wanted.new_zeros(1)  # len() would fix the size in a graph
        try:
            output = call(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=wanted,
            )
        finally:
            self._wanted = None
        logits: torch.Tensor = output.logits[0].float()
        return logits
