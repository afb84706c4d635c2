"""Penalties on what an answer has already, as OpenAI and vLLM define them; transformers only has its own, on all text.

    >>> AnswerPenalties(prompt_tokens=3, presence=0.5, frequency=0.2)(input_ids, scores)

It is called as transformers calls its logits processors. Limit: prompts of one width, as in a padded batch.
"""

from __future__ import annotations

import torch


class AnswerPenalties:
    """Takes `presence` off the score of each token of the answer, and `frequency` once for every time it is there."""

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, (rows, vocab), after `input_ids`, (rows, tokens): the prompt and the answer so far."""
        rows, width = scores.shape
        # a draft model's output layer may be narrower than its vocabulary (transformers prunes it): one more column
        answer = input_ids[:, self._prompt_tokens :].clamp(max=width)
        counts = scores.new_zeros(rows, width + 1)
        counts.scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        changed = torch.nn.functional.pad(scores, (0, 1))
        there = changed.gather(1, answer) - self._frequency * counts.gather(1, answer) - self._presence
        return changed.scatter_(1, answer, there)[:, :width]
