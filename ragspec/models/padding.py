"""Is an answer the same when its prompt is padded? Asked of every model that stock generate() runs in batches.

Models that assign token positions themselves, or whose masks ignore the padding, answer a padded prompt differently;
some only beyond a limit that their config names, so each is lowered once (limits.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ragspec.models.draft import width_of
from ragspec.models.limits import limits_of, lowered
from ragspec.models.rounding import tolerance

LENGTHS = (5, 12, 27)  # tokens of the prompts that are compared
PERIODS = (1000, 6)  # a text may repeat tokens; a model that keeps the best of its past then has ties to break


@torch.inference_mode()
def takes_padding(model: Any, pad: int) -> bool:
    """Return whether `model` computes the same for prompts in a padded batch as for each alone."""
    for limit in (None, *limits_of(model)):
        with lowered(model, limit) if limit else nullcontext():
            if not all(_is_the_same_padded(model, pad, period) for period in PERIODS):
                return False
    return True


def _is_the_same_padded(model: Any, pad: int, period: int) -> bool:
    width = width_of(model.config)
    prompts = [[(7919 * (i % period) + 11 * length + 1) % width for i in range(length)] for length in LENGTHS]
    alone = torch.cat([_logits(model, [prompt], pad) for prompt in prompts])
    together = _logits(model, prompts, pad)
    largest = alone[alone.isfinite()].abs().max().clamp_min(1e-6)
    differences = (together - alone)[alone.isfinite() & together.isfinite()].abs()
    return bool(differences.max() <= tolerance(model.dtype) * largest)


def _logits(model: Any, prompts: list[list[int]], pad: int) -> torch.Tensor:
    """Return the logits of the first and the second new token, (prompts, 2, vocab), as generate() computes them."""
    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    output = model.generate(
        input_ids=torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=2,
        min_new_tokens=2,
        do_sample=False,
        num_beams=1,
        pad_token_id=pad,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(output.logits, 1).float()
