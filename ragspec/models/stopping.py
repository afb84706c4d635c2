"""Where an answer begins and ends: reasoning before it, end tokens and stop strings after it.

    >>> thinking = thinking_of(tokenizer); answer_start(thinking, token_ids, tokenizer)
    57

Reasoning is marked by a pair of added tokens, or of words that the chat template writes (`<think>` and its relatives).
For gpt-oss, everything before the final channel's message is reasoning. Source: vLLM 0.32, vllm/reasoning. Limit:
markers that are ordinary words (Granite 3's "Here is my thought process") are text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragspec.records import Request, Thinking, Tokenizer

OPENING = re.compile(r"(?!.*(?:/|end_))\W*\w*[:_]?(?:think|thought|reason)\w*(?::\w+)?\W*", re.IGNORECASE)
WRITTEN = re.compile(r"<(?:think|thinking|thought|thoughts|reasoning)>")  # in a template, if no token is a marker
CHANNELS = ("<|channel>", "<channel|>")  # Gemma 4
LABEL = "thought\n"  # which it writes after the first
HARMONY = ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")  # gpt-oss
HARMONY_END = "<|end|>"


def thinking_of(inner: Any) -> Thinking | None:
    """Return the reasoning markers of a transformers tokenizer, None without any."""
    listed = getattr(inner, "added_tokens_decoder", None)
    added = {str(token): index for index, token in listed.items()} if isinstance(listed, dict) else {}
    if all(word in added for word in ("<|channel|>", "<|message|>", HARMONY_END)):
        opening_ids, closing_ids = (_encoded(inner, word) for word in HARMONY)
        return Thinking(*HARMONY, opening_ids, closing_ids, (added[HARMONY_END],))
    for opening, closing in (*_pairs(added), CHANNELS):
        if opening in added and closing in added:
            return Thinking(opening, closing, (added[opening],), (added[closing],))
    template = inner.chat_template or ""
    text = "".join(template.values()) if isinstance(template, dict) else str(template)
    for opening, closing in _pairs(WRITTEN.findall(text)):
        if closing in text:
            return Thinking(opening, closing)
    return None


def _pairs(words: Iterable[str]) -> list[tuple[str, str]]:
    """Return opening markers paired with the closing markers that each may have."""
    return [(word, closing) for word in words if OPENING.fullmatch(word) for closing in _closings(word)]


def _closings(opening: str) -> list[str]:
    first = next(at for at, char in enumerate(opening) if char.isalnum())
    slashed = f"{opening[:first]}/{opening[first:]}"
    ended = opening.replace("begin_of", "end_of").replace("START_", "END_").replace("start_of", "end_of")
    return [slashed, *([ended] if ended != opening else [])]


def _encoded(inner: Any, text: str) -> tuple[int, ...]:
    return tuple(inner(text, add_special_tokens=False, verbose=False)["input_ids"])


def thinking_after_prompt(thinking: Thinking, prompt: str, begun: str = "") -> Thinking | None:
    """Return the markers for the answer to a prompt; None if the prompt itself has closed the reasoning.

    begun: the message at the prompt's end that the model continues. Only the end counts; earlier text may mention
    markers.
    """
    opened, closed = begun.rfind(thinking.opening), begun.rfind(thinking.closing)
    if max(opened, closed) >= 0:
        return replace(thinking, inside=True) if opened > closed else None
    end = prompt.rstrip().removesuffix(begun.strip()).rstrip()
    if end.endswith(thinking.closing):  # later markers are part of the answer
        return None
    return replace(thinking, inside=end.endswith(thinking.opening))


def answer_start(thinking: Thinking | None, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return how many leading tokens are reasoning: all of them until the answer has begun."""
    if thinking is None:
        return 0
    ids = list(token_ids)
    if thinking.closing_ids:
        if (at := _find(ids, thinking.closing_ids)) is not None:
            return at + len(thinking.closing_ids)
        opened = thinking.inside or tuple(ids[: len(thinking.opening_ids)]) == thinking.opening_ids
        return len(ids) if opened else 0
    text = tokenizer.decode(ids)
    if thinking.closing in text:
        closed = range(len(ids) + 1)
        return bisect_left(closed, True, key=lambda count: thinking.closing in tokenizer.decode(ids[:count]))
    opened = thinking.inside or text.lstrip().startswith(thinking.opening)
    return len(ids) if opened else 0


def stop_strings_from(request: Request, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return how many leading tokens of an answer are exempt from stop strings."""
    least = request.sampling.min_new_tokens
    return max(least, answer_start(request.thinking, token_ids, tokenizer)) if request.sampling.stop else least


def split_reasoning(
    thinking: Thinking | None, token_ids: Sequence[int], tokenizer: Tokenizer, *, ended: bool = False
) -> tuple[str, str, int]:
    """Return the reasoning, the answer, and the number of tokens before the answer.

    ended: the model ended the answer. If the prompt opened the reasoning and the model never closed it, then all its
    text is the answer: it did not reason.
    """
    ids = list(token_ids)
    if thinking is not None and ended and thinking.inside and answer_start(thinking, ids, tokenizer) == len(ids):
        thinking = replace(thinking, inside=False)
    start = answer_start(thinking, ids, tokenizer)
    if thinking is None or start == 0:
        return "", tokenizer.decode(ids), 0
    if not thinking.closing_ids:
        before, _, after = tokenizer.decode(ids).partition(thinking.closing)
        return before.strip().removeprefix(thinking.opening).strip(), after.lstrip(), start
    closed = tuple(ids[start - len(thinking.closing_ids) : start]) == thinking.closing_ids
    thought = ids[: start - len(thinking.closing_ids)] if closed else ids[:start]
    if tuple(thought[: len(thinking.opening_ids)]) == thinking.opening_ids:
        thought = thought[len(thinking.opening_ids) :]
    end = next((at for at, token in enumerate(thought) if token in thinking.ends), len(thought))
    text = tokenizer.decode(thought[:end]).strip()
    if (thinking.opening, thinking.closing) == CHANNELS:
        text = text.removeprefix(LABEL)
    return text, tokenizer.decode(ids[start:]).lstrip(), start


def _find(ids: list[int], wanted: tuple[int, ...]) -> int | None:
    """Return the position of `wanted` in `ids`, None if it does not occur."""
    at = -1
    while wanted[0] in ids[at + 1 :]:
        at = ids.index(wanted[0], at + 1)
        if tuple(ids[at : at + len(wanted)]) == wanted:
            return at
    return None


# -- ends ------------------------------------------------------------------------------------------


def end_tokens(model: Any, tokenizer: Any, generate_args: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens that end an answer: from generate()'s arguments, else the model, else the tokenizer.

    Ids that the model lacks, such as -1 for none, end nothing.
    """
    own = model.generation_config.eos_token_id
    found = token_set(generate_args.get("eos_token_id", own if own is not None else tokenizer.eos_token_id))
    return found & frozenset(range(model.config.get_text_config().vocab_size))


def token_set(given: int | Iterable[int] | None) -> frozenset[int]:
    """Return the tokens of an `eos_token_id`: one, several or none."""
    return frozenset([] if given is None else [given] if isinstance(given, int) else given)


def ends_with_stop(
    tokenizer: Tokenizer, answer: Sequence[int], fresh: int, stop: Sequence[str], least: int = 0
) -> bool:
    """Return whether one of `stop` (not empty) ends within the last `fresh` tokens of `answer`.

    least: leading tokens exempt from stop strings.
    """
    reach = 4 * max(map(len, stop)) + 4  # tokens to look back for the beginning of a stop string
    begin = max(0, len(answer) - fresh - reach)
    return _holds(tokenizer, list(answer[begin:]), stop, max(0, least - begin))


def trim(
    token_ids: list[int], eos: frozenset[int], stop: Sequence[str], tokenizer: Tokenizer, least: int = 0
) -> tuple[list[int], str]:
    """Return the answer's tokens and its finish reason.

    The answer ends with the first end-of-sequence token or with the token that completes the first stop string. least:
    leading tokens exempt from both.
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
    """Return the start of the first stop string that ends beyond the first `least` characters, None without one."""
    places = (text.find(word, max(0, least + 1 - len(word))) for word in stop)
    return min((at for at in places if at >= 0), default=None)


def _holds(tokenizer: Tokenizer, token_ids: list[int], stop: Sequence[str], least: int) -> bool:
    text = tokenizer.decode(token_ids)
    return find_stop(text, stop, len(tokenizer.decode(token_ids[:least])) if least else 0) is not None
