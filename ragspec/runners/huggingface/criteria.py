"""What stock generate() is told to stop by, and the clock of its first step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

from ragspec.models.reasoning import unended
from ragspec.models.stopping import ends_with_stop
from ragspec.records import Request, Tokenizer


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

    def __init__(self, tokenizer: Tokenizer, requests: Sequence[Request], prompt_length: int) -> None:
        self._tokenizer = tokenizer
        self._requests = requests  # of one `stop`; a beam's rows are neighbours
        self._seen = prompt_length
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        fresh, self._seen = input_ids.shape[1] - self._seen, input_ids.shape[1]
        answers = input_ids[:, self._prompt_length :].tolist()
        beams = max(1, len(answers) // len(self._requests))
        hits = [self._ended(self._requests[row // beams], answer, fresh) for row, answer in enumerate(answers)]
        return torch.tensor(hits, dtype=torch.bool, device=input_ids.device)

    def _ended(self, request: Request, answer: list[int], fresh: int) -> bool:
        least = unended(request, answer, self._tokenizer)
        return ends_with_stop(self._tokenizer, answer, fresh, request.sampling.stop, least)
