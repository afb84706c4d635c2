"""Sampling with noise that belongs to a position, and the rules by which drafts are accepted.

A token's noise depends on seed, record and position only, so a sampled answer does not depend on batch, order or
speculation: taking the sample, and continuing while the draft equals it, gives exactly the text of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

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


@dataclass(frozen=True, slots=True)
class SampledDraft:
    """A draft that was itself sampled, and what the target makes of it.

    target: (k+1, vocab) and drafted: (k, vocab) probabilities. token_ids: k tokens drawn from `drafted`. position: of
    the first in the answer.
    """

    target: torch.Tensor
    drafted: torch.Tensor
    token_ids: Sequence[int]
    noise: Noise
    position: int


def reject(drafts: Sequence[SampledDraft]) -> list[list[int]]:
    """Return the tokens to emit for each draft; their distribution is the target's.

    A device is waited for twice, however many drafts there are. Source: arXiv:2211.17192 algorithm 1, arXiv:2302.01318.
    """
    emitted: list[list[int]] = []
    weights: list[torch.Tensor] = []
    uniforms: list[float] = []
    for draft, chances in zip(drafts, _chances(drafts), strict=True):
        noise, position, last = draft.noise, draft.position, len(draft.token_ids)
        passed = (noise.at(position + i, b"accept") * q < p for i, (p, q) in enumerate(chances))
        end = next((i for i, accepted in enumerate(passed) if not accepted), last)
        emitted.append(list(draft.token_ids[:end]))
        weights.append(draft.target[last] if end == last else _left(draft.target[end], draft.drafted[end]))
        uniforms.append(noise.at(position + last) if end == last else noise.at(position + end, b"residual"))
    for tokens, token in zip(emitted, draw(torch.stack(weights), uniforms), strict=True):
        tokens.append(token)
    return emitted


def _chances(drafts: Sequence[SampledDraft]) -> list[list[list[float]]]:
    """Return, for each draft, two probabilities of each of its tokens: the target's and its own."""
    ids = [torch.tensor(draft.token_ids, dtype=torch.long, device=draft.target.device)[:, None] for draft in drafts]
    target = torch.cat([draft.target[:-1].gather(1, each) for draft, each in zip(drafts, ids, strict=True)])
    drafted = torch.cat([draft.drafted.gather(1, each) for draft, each in zip(drafts, ids, strict=True)])
    pairs = iter(torch.cat([target, drafted.to(target)], dim=1).tolist())
    return [list(islice(pairs, len(draft.token_ids))) for draft in drafts]


def _left(target: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """Return what the target has beyond the draft, (vocab,); all of the target if rounding leaves nothing."""
    left = (target - drafted).clamp_(min=0)
    return torch.where(left.sum() > 0, left, target)
