"""Sampling with noise that belongs to a position, and the rules by which drafts are accepted.

A token's noise depends on seed, record and position only, so a sampled answer does not depend on batch, order or
speculation: taking the sample, and continuing while the draft equals it, gives exactly the text of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from ragspec.records import record_seed


class Noise:
    """Uniform numbers in [0, 1) for one record: `noise.at(position)`."""

    def __init__(self, seed: int, record_id: str) -> None:
        self._key = record_seed(seed, record_id).to_bytes(8)

    def at(self, position: int, use: bytes = b"token") -> float:
        """Return the number for `position` of the answer; another `use` gives an independent one."""
        digest = blake2b(position.to_bytes(8) + use, key=self._key, digest_size=8).digest()
        return (int.from_bytes(digest) >> 11) / (1 << 53)


def draw(weights: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """Return one token per row of `weights` (n, vocab), which need not be normalised, by inversion."""
    sums = weights.cumsum(-1)
    points = torch.tensor(uniforms, dtype=sums.dtype, device=sums.device)[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, points, right=True).squeeze(1)
    # rounding may put a point past the end: it belongs to the last token with any weight
    last = weights.shape[1] - 1 - (weights.flip(1) > 0).int().argmax(1)
    tokens: list[int] = torch.minimum(found, last).tolist()
    return tokens


# -- acceptance ------------------------------------------------------------------------------------


def agreement(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many leading draft tokens are the target's own choice.

    chosen: k+1 tokens; chosen[i] is the target's after draft[:i]: its argmax, or its sample with that position's noise.
    Emit chosen[: result + 1]. Source: Leviathan et al. 2023, arXiv:2211.17192, at temperature 0; with samples, the
    coupling of a deterministic draft.
    """
    for accepted, (guess, token) in enumerate(zip(draft, chosen, strict=False)):
        if guess != token:
            return accepted
    return len(draft)


def reject(target: torch.Tensor, drafted: torch.Tensor, draft: Sequence[int], noise: Noise, position: int) -> list[int]:
    """Return the tokens to emit for a draft that was itself sampled; their distribution is the target's.

    target: (k+1, vocab) and drafted: (k, vocab) probabilities; draft: k tokens drawn from `drafted`. position: of
    the first in the answer. Source: arXiv:2211.17192 algorithm 1, arXiv:2302.01318.
    """
    emitted: list[int] = []
    for i, token in enumerate(draft):
        p, q = float(target[i, token]), float(drafted[i, token])
        if noise.at(position + i, b"accept") * q < p:
            emitted.append(token)
            continue
        left = (target[i] - drafted[i]).clamp_(min=0)
        if float(left.sum()) <= 0.0:  # equal up to rounding
            left = target[i]
        return emitted + draw(left[None], [noise.at(position + i, b"residual")])
    return emitted + draw(target[len(draft)][None], [noise.at(position + len(draft))])
