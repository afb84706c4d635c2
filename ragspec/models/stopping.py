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


def ends_with_stop(
    tokenizer: Tokenizer, answer: Sequence[int], fresh: int, stop: Sequence[str], least: int = 0
) -> bool:
    """Return whether one of `stop`, which must not be empty, ends within the last `fresh` tokens of `answer`.

    least: tokens at its begin in which no stop string counts.
    """
    reach = 4 * max(map(len, stop)) + 4  # tokens back in which a stop string can begin
    begin = max(0, len(answer) - fresh - reach)
    return _holds(tokenizer, list(answer[begin:]), stop, max(0, least - begin))


def trim(
    token_ids: list[int], eos: frozenset[int], stop: Sequence[str], tokenizer: Tokenizer, least: int = 0
) -> tuple[list[int], str]:
    """Return the answer's tokens and why it ended.

    Ends with the first end-of-sequence token, or with the token that completes the first stop string. least: tokens in
    which neither counts.
    """
    reason = "length"
    end = next((i for i, token in enumerate(token_ids) if token in eos and i >= least), None)
    if end is not None:
        token_ids, reason = token_ids[: end + 1], "stop"
    if stop and _holds(tokenizer, token_ids, stop, least):
        held = range(least, len(token_ids))
        end = held[bisect_left(held, True, key=lambda i: _holds(tokenizer, token_ids[: i + 1], stop, least))]
        return token_ids[: end + 1], "stop"
    return token_ids, reason


def find_stop(text: str, stop: Sequence[str], least: int = 0) -> int | None:
    """Return where the first stop string begins that ends beyond the first `least` characters; None without one."""
    places = (text.find(word, max(0, least + 1 - len(word))) for word in stop)
    return min((at for at in places if at >= 0), default=None)


def _holds(tokenizer: Tokenizer, token_ids: list[int], stop: Sequence[str], least: int) -> bool:
    text = tokenizer.decode(token_ids)
    return find_stop(text, stop, len(tokenizer.decode(token_ids[:least])) if least else 0) is not None
