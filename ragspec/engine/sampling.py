"""How logits become tokens: transformers' own processors in their own order, and noise that belongs to a position.

A token's noise depends on seed, record and position only, so a sampled answer does not depend on batch, order or
speculation: emitting the sample, and going on while the draft equals it, gives exactly the text of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch

from ragspec.records import Sampling, record_seed


class Noise:
    """Uniform numbers in [0, 1) of one record: `noise.at(position)`."""

    def __init__(self, seed: int, record_id: str) -> None:
        self._key = record_seed(seed, record_id).to_bytes(8)

    def at(self, position: int, use: bytes = b"token") -> float:
        """Return the number for `position` of the answer; another `use` gives an independent one."""
        digest = blake2b(position.to_bytes(8) + use, key=self._key, digest_size=8).digest()
        return (int.from_bytes(digest) >> 11) / (1 << 53)


def penalise(logits: torch.Tensor, penalty: float, seen: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return logits (n, vocab) with the repetition penalty of each row's `seen` tokens. Source: arXiv:1909.05858."""
    if penalty == 1.0:
        return logits
    from transformers import RepetitionPenaltyLogitsProcessor

    processor = RepetitionPenaltyLogitsProcessor(penalty)
    rows = zip(logits, seen, strict=True)
    return torch.cat([processor(torch.tensor([ids], device=row.device), row[None]) for row, ids in rows])


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return (n, vocab) in float64: temperature, top-k, top-p, min-p, softmax. temperature must be over 0."""
    for warper in _warpers(sampling):
        logits = warper(None, logits)
    return torch.softmax(logits.double(), dim=-1)


def _warpers(sampling: Sampling) -> list[Any]:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers: list[Any] = []
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers


def draw(weights: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """Return one token per row of `weights` (n, vocab), which need not add up to 1, by inversion."""
    sums = weights.cumsum(-1)
    points = torch.tensor(uniforms, dtype=sums.dtype, device=sums.device)[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, points, right=True).squeeze(1)
    # rounding may put a point at the very end: it belongs to the last token that has any weight
    last = weights.shape[1] - 1 - (weights.flip(1) > 0).int().argmax(1)
    tokens: list[int] = torch.minimum(found, last).tolist()
    return tokens
