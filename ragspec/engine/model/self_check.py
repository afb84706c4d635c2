"""Does the model compute the same in the engine as in transformers? Checked once for every model, after loading.

The text is short, so each limit in the model's config (a window, a chunk, an original length) is lowered and the check
repeated. A limit that cannot be lowered is crossed by a text of its length, if that is quick. The kernels' attention is
checked too, for exactness and speed, since both depend on the C++ compiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from ragspec.engine.model.forward import Model
from ragspec.engine.model.kv_splits import PrefixGroup, Query, split_kv
from ragspec.engine.model.layout import Segment
from ragspec.engine.model.masks import Unsupported
from ragspec.engine.model.weight_layouts import one_thread
from ragspec.engine.native.kernels import Kernels
from ragspec.models.compat import Limit, cache_argument, is_static, limits_of, lowered
from ragspec.models.draft import width_of

TOKENS = 48
STEPS = 7  # of these tokens are computed one by one
CHUNK = 512  # tokens per forward while crossing a limit
PATIENCE_S = 30.0  # to cross a limit in full


def differs(model: Model, tolerance: float) -> str:
    """Return how the model's results in the engine differ from transformers', "" if they do not.

    Raises Unsupported if a limit cannot be checked. The cache is empty afterwards.
    """
    ids = token_ids(model.inner, TOKENS)
    got = packed(model)  # before the reference: a module that remembers long texts must not have seen one yet
    started = time.perf_counter()
    expected = reference(model, ids)
    seconds = time.perf_counter() - started
    error = relative(got, expected)
    if not error <= tolerance:
        return f"computes different logits in packed rows (by {error:.1e} of the largest)"
    return _differs_beyond_limits(model, expected, tolerance, seconds)


def _differs_beyond_limits(model: Model, expected: torch.Tensor, tolerance: float, seconds: float) -> str:
    """Return how results differ beyond one of the model's limits. seconds: time to compute `expected`."""
    ids = token_ids(model.inner, TOKENS)
    for limit in limits_of(model.inner):
        if limit.tokens < TOKENS:
            continue  # the text is longer already
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

    Computed as in generate(): the last STEPS tokens one by one, with the model's own cache.
    """
    text = torch.tensor([ids], device=model.device)
    with model.as_it_was() as inner:
        word = cache_argument(type(inner).forward)
        outputs = [inner(text[:, :-STEPS], use_cache=True)]
        for at in range(len(ids) - STEPS, len(ids)):
            position = torch.tensor([[at]], device=model.device)
            cache = outputs[-1].past_key_values
            outputs.append(inner(text[:, at : at + 1], position_ids=position, use_cache=True, **{word: cache}))
    return torch.cat([output.logits[0].float() for output in outputs])


def packed(model: Model) -> torch.Tensor:
    """Return the engine's logits, (TOKENS, vocab), for the same text.

    Covers two rows at once, chunks, a rejected draft that leaves stale slots, and single tokens and a draft beside a
    chunk of the other row, which is shorter. The cache is empty afterwards.
    """
    ids = token_ids(model.inner, TOKENS)
    rows = model.cache.rows
    model.resize(2)
    wrong = ids[::-1]
    half, last = TOKENS // 2, TOKENS - STEPS

    def mine(start: int, count: int, alone: bool = False) -> Segment:
        return Segment(0, start, count, alone, base=last)

    parts = [
        model.logits([mine(0, half, True), Segment(1, 0, 7, True)], ids[:half] + ids[:7], range(half)),
        model.logits([mine(half, 6), Segment(1, 7, 2)], wrong[:6] + ids[7:9], [6, 7])[:0],  # a rejected draft
        model.logits([Segment(1, 9, 1), mine(half, 5)], [ids[9], *ids[half : half + 5]], range(1, 6)),
        model.logits([Segment(1, 10, 1), mine(half + 5, 12, True)], ids[10:11] + ids[half + 5 : last], range(1, 13)),
        model.logits([mine(last, 1), Segment(1, 11, 5, True)], ids[last : last + 1] + ids[11:16], [0]),
        model.logits([mine(last + 1, 3), Segment(1, 16, 5, True)], ids[last + 1 : last + 4] + ids[16:21], range(3)),
        *(model.logits([mine(at, 1)], [ids[at]], [0]) for at in range(last + 4, TOKENS)),
    ]
    model.resize(rows)
    return torch.cat(parts)


def _cross(model: Model, limit: Limit, seconds: float) -> float:
    """Return the difference after a text as long as the limit. seconds: time for TOKENS tokens."""
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
    """Return a reproducible text of `count` token ids."""
    width = width_of(inner.config)
    return [(7919 * i + 11) % width for i in range(count)]


# -- kernels ---------------------------------------------------------------------------------------
#
#     >>> attention_is_exact(kernels) and kernels_are_faster(kernels)
#     True
#
# Longer than the self-check's text, which is not split. Linear layers are checked in weight_layouts.py. Limit: the
# speed is that of one thread, so that a busy machine gives the same answer.
REPEATS = 7  # of each implementation, alternating
MOST = 1.25  # of torch's time
GROUPS, KV_HEADS = 3, 2
SLOTS = 256
CASES = ((4, 1), (1, 256))  # (rows, tokens of each): decoding, and a prompt from its start
TOLERANCE = 1e-4  # of the largest result; more is not rounding
TALL = 300  # slots of the compared rows: more than a block of the kernels
HELD = 128  # slots that two rows have in common


@torch.inference_mode()
def kernels_are_faster(kernels: Kernels) -> bool:
    """Return whether decoding and prompts take about torch's time or less."""
    with one_thread():
        return all(_ratio(kernels, *case) < MOST for case in CASES)


@torch.inference_mode()
def attention_is_exact(kernels: Kernels) -> bool:
    """Return whether rows in several splits, two of them with a common prefix, attend as plain matrix products say."""
    random = torch.Generator().manual_seed(0)
    row_tokens = [1, 1, TALL]  # two rows decode, one computes a prompt from its start
    tokens, heads = sum(row_tokens), GROUPS * KV_HEADS
    query = torch.randn(heads, tokens, kernels.head, generator=random)
    keys, values = (torch.randn(KV_HEADS, 3, TALL, kernels.head, generator=random) for _ in range(2))
    keys[:, 1, :HELD], values[:, 1, :HELD] = keys[:, 0, :HELD], values[:, 0, :HELD]
    queries = {0: [(0, TALL)], 1: [(1, TALL)], 2: [(2 + i, i + 1) for i in range(TALL)]}
    work = split_kv(queries, [PrefixGroup(0, {1: HELD})], tokens, threads=4)
    scale = kernels.head**-0.5
    for cap in (None, 2.0):
        got = torch.empty(tokens, heads, kernels.head)
        kernels.attend(query, keys, values, scale, work, got, cap)
        expected = torch.empty_like(got)
        for row, asked in queries.items():
            packed, seen = (torch.tensor(each) for each in zip(*asked, strict=True))
            own_keys, own_values = (each[:, row].repeat_interleave(GROUPS, 0) for each in (keys, values))
            scores = query[:, packed] @ own_keys.mT * scale
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            scores.masked_fill_(torch.arange(TALL) >= seen[:, None], float("-inf"))
            expected[packed] = (scores.softmax(-1) @ own_values).transpose(0, 1)
        if not (got - expected).abs().max() <= TOLERANCE * expected.abs().max():
            return False
    return True


def _ratio(kernels: Kernels, rows: int, tokens: int) -> float:
    """Return the kernels' seconds over torch's, for the last `tokens` of SLOTS in each row."""
    heads = GROUPS * KV_HEADS
    query = torch.ones(heads, rows * tokens, kernels.head)
    keys, values = (torch.ones(KV_HEADS, rows, SLOTS, kernels.head) for _ in range(2))
    out = torch.empty(rows * tokens, heads, kernels.head)
    queries = {row: list(_last(row * tokens, tokens)) for row in range(rows)}
    work = split_kv(queries, [], rows * tokens, 1)

    def ours() -> None:
        kernels.attend(query, keys, values, 1.0, work, out)

    def theirs() -> None:
        asked = query.view(heads, rows, tokens, kernels.head).transpose(0, 1)
        seen, weighed = (each.transpose(0, 1).repeat_interleave(GROUPS, 1) for each in (keys, values))
        attention(asked, seen, weighed, is_causal=tokens == SLOTS)

    taken: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    for _ in range(REPEATS):
        for attend, seconds in taken.items():
            started = time.perf_counter()
            attend()
            seconds.append(time.perf_counter() - started)
    return median(taken[ours]) / median(taken[theirs])


def _last(first: int, tokens: int) -> list[Query]:
    """Return the last `tokens` queries of a row whose first one has packed index `first`."""
    return [(first + i, SLOTS - tokens + i + 1) for i in range(tokens)]
