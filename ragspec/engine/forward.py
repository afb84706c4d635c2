"""One forward of a Hugging Face model over packed segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ragspec.engine.attention import NAME, register
from ragspec.engine.cache import RaggedCache
from ragspec.engine.frequencies import Frequencies
from ragspec.engine.layout import Layout, Segment


class Model:
    """A causal model, with the keys and values of its rows."""

    def __init__(self, inner: Any, rows: int) -> None:
        register()
        self.inner = inner
        self.device: torch.device = inner.device
        self.cache = RaggedCache(rows)
        self._own_attention = inner.config._attn_implementation
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
    def logits(self, segments: list[Segment], token_ids: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
        """Run the segments' tokens and return the logits, (wanted, vocab) in float32, of the packed indices `wanted`.

        token_ids: the tokens of all segments in packed order. Their keys and values are in the cache afterwards.
        """
        self.cache.reserve(max(segment.start + segment.count for segment in segments))
        layout = Layout(segments, self.cache.slots, self.device)
        indices = torch.tensor(wanted, dtype=torch.long, device=self.device)
        self._tokens = len(token_ids)
        self._wanted = None if len(wanted) == len(token_ids) else indices if wanted else indices.new_zeros(1)
        try:
            with self.cache.forward(layout):
                output = self.inner(
                    input_ids=torch.tensor([token_ids], device=self.device),
                    position_ids=layout.positions[None],
                    past_key_values=self.cache,
                    use_cache=True,
                    logits_to_keep=indices,
                )
        finally:
            self._wanted = None
        logits: torch.Tensor = output.logits[0].float()
        return logits
