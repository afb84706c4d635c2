"""Does this model compute the same in the engine as in transformers? Asked of every model, once, after loading."""

from __future__ import annotations

from typing import Any

import torch

from ragspec.engine.forward import Model
from ragspec.engine.layout import Segment

TOKENS = 48
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # of the largest logit; others: HALF
HALF = 5e-2


@torch.inference_mode()
def reference(inner: Any) -> torch.Tensor:
    """Return transformers' own logits, (TOKENS, vocab), for a fixed text of token ids."""
    logits: torch.Tensor = inner(torch.tensor([_token_ids(inner)], device=inner.device)).logits[0].float()
    return logits


def difference(model: Model, expected: torch.Tensor) -> float:
    """Return the largest difference from `expected`, relative to its largest logit.

    The text goes through two rows at once, in chunks, as a draft with stale slots behind it, and token by token.
    The cache is empty afterwards.
    """
    ids = _token_ids(model.inner)
    rows = model.cache.rows
    model.resize(2)
    wrong = ids[::-1]
    half = TOKENS // 2
    parts = [
        model.logits([Segment(0, 0, half, True), Segment(1, 0, 7, True)], ids[:half] + ids[:7], range(half)),
        model.logits([Segment(0, half, 6), Segment(1, 7, 2)], wrong[:6] + ids[7:9], [6, 7])[:0],  # a rejected draft
        model.logits([Segment(1, 9, 1), Segment(0, half, 5)], [ids[9], *ids[half : half + 5]], range(1, 6)),
        model.logits([Segment(0, half + 5, 12, True)], ids[half + 5 : half + 17], range(12)),
        *(model.logits([Segment(0, at, 1)], [ids[at]], [0]) for at in range(half + 17, TOKENS)),
    ]
    got = torch.cat(parts)
    model.resize(rows)
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest difference that is rounding."""
    return TOLERANCE.get(dtype, HALF)


def _token_ids(inner: Any) -> list[int]:
    width = int(inner.config.get_text_config().vocab_size)
    return [(7919 * i + 11) % width for i in range(TOKENS)]
