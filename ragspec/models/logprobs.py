"""How likely a model found the tokens of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ragspec.records import TokenLogprob


def token_logprobs(logits: torch.Tensor, chosen: Sequence[int], most: int) -> list[TokenLogprob]:
    """Return how likely each of the `chosen` tokens was, beside the `most` likeliest ones.

    logits: (n, vocab), the model's own, nothing added or taken off; row i is what chosen[i] was chosen from.
    """
    logs = torch.log_softmax(logits[: len(chosen)].float(), dim=-1)
    own = logs.gather(1, torch.tensor(chosen, dtype=torch.long, device=logs.device)[:, None]).squeeze(1)
    best = logs.topk(min(most, logs.shape[1]))
    told = zip(own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenLogprob(value, tuple(zip(ids, values, strict=True))) for value, ids, values in told]


def generated_logprobs(output: Any, row: int, chosen: list[int], most: int | None) -> tuple[TokenLogprob, ...]:
    """Return how likely the tokens of one row of a generate() call were; nothing where `most` is None.

    output: what generate() returned. Its logits are one (rows, vocab) per token, with a row per beam where it searched.
    """
    if most is None or not chosen:
        return ()
    beams = getattr(output, "beam_indices", None)
    rows = [row] * len(chosen) if beams is None else beams[row].tolist()
    logits = torch.stack([step[at] for step, at, _ in zip(output.logits, rows, chosen, strict=False)])
    return tuple(token_logprobs(logits, chosen, most))
