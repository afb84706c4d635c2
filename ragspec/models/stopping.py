"""Where an answer ends: the end-of-sequence tokens, the stop strings, and the clock of the first step."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

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
    """Stops rows whose new text holds a stop string, wherever in the last step's tokens it ended.

    transformers' own stop_strings only look at the very last token (5.19), so a stop string inside an accepted draft
    would be run over.
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


def end_tokens(model: Any, tokenizer: Any, generate_args: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens that end an answer: those of generate()'s arguments, else the model's, else the tokenizer's."""
    own = model.generation_config.eos_token_id
    found = generate_args.get("eos_token_id", own if own is not None else tokenizer.eos_token_id)
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)


def ends_with_stop(tokenizer: Tokenizer, answer: Sequence[int], fresh: int, stop: Sequence[str]) -> bool:
    """Return whether one of `stop`, which must hold one, ends within the last `fresh` tokens of `answer`."""
    reach = 4 * max(map(len, stop)) + 4  # tokens back in which a stop string can begin
    return _holds(tokenizer, list(answer[max(0, len(answer) - fresh - reach) :]), stop)


def trim(token_ids: list[int], eos: frozenset[int], stop: Sequence[str], tokenizer: Tokenizer) -> tuple[list[int], str]:
    """Return the answer's tokens and why it ended.

    Ends with the first end-of-sequence token, or with the token that completes the first stop string.
    """
    reason = "length"
    end = next((i for i, token in enumerate(token_ids) if token in eos), None)
    if end is not None:
        token_ids, reason = token_ids[: end + 1], "stop"
    if stop and _holds(tokenizer, token_ids, stop):
        end = bisect_left(range(len(token_ids)), True, key=lambda i: _holds(tokenizer, token_ids[: i + 1], stop))
        return token_ids[: end + 1], "stop"
    return token_ids, reason


def _holds(tokenizer: Tokenizer, token_ids: list[int], stop: Sequence[str]) -> bool:
    text = tokenizer.decode(token_ids)
    return any(word in text for word in stop)
