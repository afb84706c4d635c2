"""Whether the kernels' attention is any faster here than torch's: what a compiler makes of them is not known before.

    >>> worth_having(kernels)
    True

Linear layers are told by forms.py. Limit: one thread, so that it can be told on a busy machine too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from ragspec.engine.native.kernels import Kernels
from ragspec.engine.pieces import Query, cut

REPEATS = 7  # of each, in turn
MOST = 1.25  # times torch's seconds
GROUPS, KV_HEADS = 3, 2
SLOTS = 256
CASES = ((4, 1), (1, 256))  # rows and tokens of each: decoding, and a prompt from its beginning


@torch.inference_mode()
def worth_having(kernels: Kernels) -> bool:
    """Return whether rows decode, and prompts are computed, in about torch's time or less."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return all(_ratio(kernels, *case) < MOST for case in CASES)
    finally:
        torch.set_num_threads(threads)


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
