"""Whether the kernels' attention is right here, and no slower than torch's: it depends on what a compiler made of it.

    >>> attends_right(kernels) and worth_having(kernels)
    True

The self-check's text is too short to be cut into pieces; this is longer. Linear layers are told by linear.py and
forms.py. Limit: speed is that of one thread, so that it can be told on a busy machine too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from ragspec.engine.forms import one_thread
from ragspec.engine.native.kernels import Kernels
from ragspec.engine.pieces import Query, Together, cut

REPEATS = 7  # of each, in turn
MOST = 1.25  # times torch's seconds
GROUPS, KV_HEADS = 3, 2
SLOTS = 256
CASES = ((4, 1), (1, 256))  # rows and tokens of each: decoding, and a prompt from its beginning
TOLERANCE = 1e-4  # of the largest result; more is not rounding
TALL = 300  # slots of a row whose result is compared: more than a block of the kernels
HELD = 128  # of them that two rows hold together


@torch.inference_mode()
def worth_having(kernels: Kernels) -> bool:
    """Return whether rows decode, and prompts are computed, in about torch's time or less."""
    with one_thread():
        return all(_ratio(kernels, *case) < MOST for case in CASES)


@torch.inference_mode()
def attends_right(kernels: Kernels) -> bool:
    """Return whether rows in several pieces, of which two begin alike, attend as torch's matrix products say."""
    random = torch.Generator().manual_seed(0)
    row_tokens = [1, 1, TALL]  # two rows decode; a prompt is computed from its beginning
    tokens, heads = sum(row_tokens), GROUPS * KV_HEADS
    query = torch.randn(heads, tokens, kernels.head, generator=random)
    keys, values = (torch.randn(KV_HEADS, 3, TALL, kernels.head, generator=random) for _ in range(2))
    keys[:, 1, :HELD], values[:, 1, :HELD] = keys[:, 0, :HELD], values[:, 0, :HELD]
    queries = {0: [(0, TALL)], 1: [(1, TALL)], 2: [(2 + i, i + 1) for i in range(TALL)]}
    work = cut(queries, [Together(0, {1: HELD})], tokens, threads=4)
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
    """Return the kernels' seconds over torch's, for the last `tokens` of SLOTS of each row."""
    heads = GROUPS * KV_HEADS
    query = torch.ones(heads, rows * tokens, kernels.head)
    keys, values = (torch.ones(KV_HEADS, rows, SLOTS, kernels.head) for _ in range(2))
    out = torch.empty(rows * tokens, heads, kernels.head)
    queries = {row: list(_last(row * tokens, tokens)) for row in range(rows)}
    work = cut(queries, [], rows * tokens, 1)

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
    """Return the last `tokens` queries of a row, whose first one is `first` in the packed order."""
    return [(first + i, SLOTS - tokens + i + 1) for i in range(tokens)]
