"""The accept rules: pure functions from the target's choice and the draft to what is emitted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragspec.engine.sampling import Noise, draw


def agreement(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many leading draft tokens are the target's own choice.

    chosen: k+1 tokens, chosen[i] being the target's after draft[:i]: its argmax, or its sample with the noise of that
    position. Emit chosen[: result + 1]. Source: Leviathan et al. 2023, arXiv:2211.17192, at temperature 0; with
    samples, the coupling of a deterministic draft.
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
        if float(left.sum()) <= 0.0:  # the two are equal but for rounding
            left = target[i]
        return emitted + draw(left[None], [noise.at(position + i, b"residual")])
    return emitted + draw(target[len(draft)][None], [noise.at(position + len(draft))])
