"""Where an answer ends: the end-of-sequence tokens and the stop strings. Standard library only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from ragspec.records import Tokenizer


def end_tokens(model: Any, tokenizer: Any, generate_args: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens that end an answer: those of generate()'s arguments, else the model's, else the tokenizer's."""
    own = model.generation_config.eos_token_id
    found = generate_args.get("eos_token_id", own if own is not None else tokenizer.eos_token_id)
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)


def ends_with_stop(tokenizer: Tokenizer, answer: Sequence[int], fresh: int, stop: Sequence[str]) -> bool:
    """Return whether one of `stop`, which must not be empty, ends within the last `fresh` tokens of `answer`."""
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
