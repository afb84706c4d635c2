"""Does this model compute the same in the engine as in transformers? Every model is asked once, after loading.

The text is short, so each limit that the model's config names (a window, a chunk, an original length) is lowered and
the question asked again. A limit that cannot be lowered is crossed by a text of its length, if that is quick.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ragspec.engine.forward import Model
from ragspec.engine.layout import Segment
from ragspec.engine.masks import Unsupported
from ragspec.models.draft import width_of
from ragspec.models.forwards import cache_word
from ragspec.models.limits import Limit, is_static, limits_of, lowered

TOKENS = 48
STEPS = 7  # of these tokens are computed one by one
CHUNK = 512  # tokens of a forward while a limit is crossed
PATIENCE_S = 30.0  # to cross a limit in full


def differs(model: Model, tolerance: float) -> str:
    """Return how the model computes something else in the engine than in transformers, "" where it does not.

    Raises Unsupported where a limit cannot be checked. The cache is empty afterwards.
    """
    ids = token_ids(model.inner, TOKENS)
    got = packed(model)  # before the reference: a module that remembers long texts must not have seen one
    started = time.perf_counter()
    expected = reference(model, ids)
    seconds = time.perf_counter() - started
    error = relative(got, expected)
    if not error <= tolerance:
        return f"computes different logits in packed rows (by {error:.1e} of the largest)"
    return _differs_beyond_limits(model, expected, tolerance, seconds)


def _differs_beyond_limits(model: Model, expected: torch.Tensor, tolerance: float, seconds: float) -> str:
    """Return how it differs beyond one of its limits. seconds: what computing `expected` took."""
    ids = token_ids(model.inner, TOKENS)
    for limit in limits_of(model.inner):
        if limit.tokens < TOKENS:
            continue  # the text has crossed it already
        with lowered(model.inner, limit):
            got, near = packed(model), reference(model, ids)
        error = relative(got, near)
        if relative(near, expected) <= tolerance:  # lowering it changed nothing
            if is_static(model.inner, limit):
                continue
            error = _cross(model, limit, seconds)
        if not error <= tolerance:
            where = f"its {limit.name} of {limit.tokens}"
            return f"computes different logits beyond {where} (by {error:.1e} of the largest)"
    return ""


@torch.inference_mode()
def reference(model: Model, ids: list[int]) -> torch.Tensor:
    """Return transformers' own logits, (tokens, vocab), for a text of token ids.

    They are computed as generate() does: the last STEPS tokens one by one, from the model's own cache.
    """
    text = torch.tensor([ids], device=model.device)
    with model.as_it_was() as inner:
        word = cache_word(type(inner).forward)
        outputs = [inner(text[:, :-STEPS], use_cache=True)]
        for at in range(len(ids) - STEPS, len(ids)):
            position = torch.tensor([[at]], device=model.device)
            cache = outputs[-1].past_key_values
            outputs.append(inner(text[:, at : at + 1], position_ids=position, use_cache=True, **{word: cache}))
    return torch.cat([output.logits[0].float() for output in outputs])


def packed(model: Model) -> torch.Tensor:
    """Return the engine's logits, (TOKENS, vocab), for the same text.

    The text goes through two rows at once, in chunks, as a draft with stale slots behind it, and token by token; its
    neighbour is another, shorter one. The cache is empty afterwards.
    """
    ids = token_ids(model.inner, TOKENS)
    rows = model.cache.rows
    model.resize(2)
    wrong = ids[::-1]
    half = TOKENS // 2

    def mine(start: int, count: int, alone: bool = False) -> Segment:
        return Segment(0, start, count, alone, base=TOKENS - STEPS)

    parts = [
        model.logits([mine(0, half, True), Segment(1, 0, 7, True)], ids[:half] + ids[:7], range(half)),
        model.logits([mine(half, 6), Segment(1, 7, 2)], wrong[:6] + ids[7:9], [6, 7])[:0],  # a rejected draft
        model.logits([Segment(1, 9, 1), mine(half, 5)], [ids[9], *ids[half : half + 5]], range(1, 6)),
        model.logits([mine(half + 5, 12, True)], ids[half + 5 : TOKENS - STEPS], range(12)),
        *(model.logits([mine(at, 1)], [ids[at]], [0]) for at in range(TOKENS - STEPS, TOKENS)),
    ]
    model.resize(rows)
    return torch.cat(parts)


def _cross(model: Model, limit: Limit, seconds: float) -> float:
    """Return the difference after a text as long as the limit. seconds: what TOKENS tokens take."""
    length = limit.tokens + STEPS
    if seconds * length / TOKENS > PATIENCE_S:
        raise Unsupported(f"has a {limit.name} of {limit.tokens} that a short check cannot cross")
    ids = token_ids(model.inner, length)
    rows = model.cache.rows
    model.resize(1)
    for start in range(0, limit.tokens, CHUNK):
        count = min(CHUNK, limit.tokens - start)
        model.logits([Segment(0, start, count, True, base=limit.tokens)], ids[start : start + count], [0])
    last = range(limit.tokens, length)
    got = torch.cat([model.logits([Segment(0, at, 1, base=limit.tokens)], [ids[at]], [0]) for at in last])
    model.resize(rows)
    return relative(got, reference(model, ids)[-STEPS:])


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-6))


def token_ids(inner: Any, count: int) -> list[int]:
    """Return a text of `count` token ids, always the same."""
    width = width_of(inner.config)
    return [(7919 * i + 11) % width for i in range(count)]
