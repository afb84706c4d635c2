"""One forward of a Hugging Face model over packed segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ragspec.engine.attention import NAME, register
from ragspec.engine.cache import RaggedCache
from ragspec.engine.layout import Layout, Segment


class Model:
    """A causal model with the keys and values of its rows."""

    def __init__(self, inner: Any, rows: int) -> None:
        register()
        inner.set_attn_implementation(NAME)
        self.inner = inner
        self.device: torch.device = inner.device
        self.cache = RaggedCache(rows)

    def resize(self, rows: int) -> None:
        """Forget all rows and make place for `rows`."""
        self.cache = RaggedCache(rows)

    @torch.inference_mode()
    def logits(self, segments: list[Segment], token_ids: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
        """Run the segments' tokens and return the logits, (wanted, vocab) in float32, of the packed indices `wanted`.

        token_ids: the tokens of all segments in packed order. Their keys and values are in the cache afterwards.
        """
        self.cache.reserve(max(segment.start + segment.count for segment in segments))
        layout = Layout(segments, self.cache.slots, self.device)
        self.cache.layout = layout
        try:
            output = self.inner(
                input_ids=torch.tensor([token_ids], device=self.device),
                position_ids=layout.positions[None],
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self.device),
            )
        finally:
            self.cache.layout = None
        logits: torch.Tensor = output.logits[0].float()
        return logits
