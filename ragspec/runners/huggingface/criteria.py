"""What stock generate() is told to stop by, and the clock of its first step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

from ragspec.models.stopping import ends_with_stop
from ragspec.records import Tokenizer


class StepClock(StoppingCriteria):  # type: ignore[misc]
    """Never stops; notes when the first step ended and how many tokens a row had then."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self.first_step_at: float | None = None
        self.first_step_tokens = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.first_step_at is None:
            self.first_step_at = time.perf_counter()
            self.first_step_tokens = input_ids.shape[1] - self._prompt_length
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class StopText(StoppingCriteria):  # type: ignore[misc]
    """Stops rows whose new text contains a stop string, wherever in the last step's tokens it ended.

    transformers' own stop_strings only look at the very last token (5.19), so a stop string inside an accepted draft
    would be missed.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], prompt_length: int) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._seen = prompt_length
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        fresh, self._seen = input_ids.shape[1] - self._seen, input_ids.shape[1]
        answers = input_ids[:, self._prompt_length :].tolist()
        hits = [ends_with_stop(self._tokenizer, answer, fresh, self._stop) for answer in answers]
        return torch.tensor(hits, dtype=torch.bool, device=input_ids.device)
