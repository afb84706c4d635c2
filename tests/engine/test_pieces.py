"""Attention in pieces: what the kernels compute, and which rows read their first tokens together."""

import pytest
import torch

from ragspec.engine.model.kv_splits import PrefixGroup, split_kv
from ragspec.engine.native.kernels import build
from ragspec.engine.request_state import RequestState
from ragspec.engine.sampling import Noise
from ragspec.engine.scheduler import LEAST, PrefixGroups
from ragspec.host.compiler import Unbuilt
from ragspec.records import Request, Sampling
from tests.conftest import wide

HEADS = (8, 16, 24, 64, 80)


@pytest.fixture(scope="module", params=HEADS)
def kernels(request):
    try:
        return build(request.param)
    except Unbuilt as reason:
        pytest.skip(str(reason))


def expected(query, keys, values, segments, scale, cap=None):
    """Return the textbook's attention, token by token: (T, heads, head)."""
    groups = query.shape[0] // keys.shape[0]
    out = []
    for row, start, count in segments:
        for position in range(start, start + count):
            mine = query[:, len(out)]
            seen = keys[:, row, : position + 1].repeat_interleave(groups, 0)
            scores = (seen @ mine[:, :, None])[..., 0] * scale
            scores = cap * torch.tanh(scores / cap) if cap else scores
            out.append(
                (scores.softmax(-1)[:, None] @ values[:, row, : position + 1].repeat_interleave(groups, 0))[:, 0]
            )
    return torch.stack(out)


def numbered(segments):
    """Return each row's queries as (packed token, tokens in sight)."""
    queries, at = {}, 0
    for row, start, count in segments:
        queries[row] = [(at + i, start + i + 1) for i in range(count)]
        at += count
    return queries


@pytest.mark.parametrize("groups", [1, 2, 3, 5])
@pytest.mark.parametrize("threads", [*wide(1), 2, *wide(40)])
@pytest.mark.parametrize(
    "segments",
    [
        [(0, 0, 1)],
        [(0, 37, 1), (2, 5, 4)],
        [(1, 700, 3), (0, 1300, 1), (3, 15, 2)],
        [(0, 130, 2), (1, 120, 1), (2, 100, 5), (3, 500, 1)],
        [(0, 0, 150), (1, 600, 70)],
        [(0, 260, 40), (1, 200, 33), (2, 150, 1), (3, 90, 12)],
    ],
)
def test_pieces_compute_what_the_textbook_says(kernels, groups, threads, segments):
    torch.manual_seed(0)
    kv_heads, rows, slots = 2, 4, 1400
    keys, values = torch.randn(2, kv_heads, rows, slots, kernels.head)
    shared = PrefixGroup(segments[0][0], {row: min(64 + 10 * row, start) for row, start, _ in segments[1:]})
    for row, tokens in shared.tokens.items():
        keys[:, row, :tokens] = keys[:, shared.leader, :tokens]
        values[:, row, :tokens] = values[:, shared.leader, :tokens]
    if len(segments) > 1 and segments[0][1] < max(shared.tokens.values()):
        shared = PrefixGroup(segments[0][0], {})  # the leader must hold what it lends
    tokens = sum(count for _, _, count in segments)
    query = torch.randn(tokens, kv_heads * groups, kernels.head).transpose(0, 1)
    queries = numbered(segments)
    out = torch.full((tokens + 1, kv_heads * groups, kernels.head), 7.0)
    for together in ([], [shared] if shared.tokens else []):
        work = split_kv(queries, together, tokens, threads)
        kernels.attend(query, keys, values, 0.2, work, out)
        assert torch.allclose(out[:tokens], expected(query, keys, values, segments, 0.2), atol=1e-5)
        assert (out[tokens:] == 7).all(), "a token that attends elsewhere is left alone"


def test_large_scores_neither_overflow_nor_vanish(kernels):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 1, 200, kernels.head) * 30
    query = torch.randn(1, 1, kernels.head) * 30
    out = torch.empty(1, 1, kernels.head)
    kernels.attend(query, keys, values, 1.0, split_kv({0: [(0, 200)]}, [], 1, 2), out)
    assert torch.allclose(out, expected(query, keys, values, [(0, 199, 1)], 1.0), atol=1e-4)


@pytest.mark.parametrize("segments", [[(0, 37, 1), (2, 5, 4)], [(0, 0, 150), (1, 600, 70)]])
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_capped_scores_are_the_textbooks_too(kernels, segments, cap):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 700, kernels.head) * 3
    tokens = sum(count for _, _, count in segments)
    query = torch.randn(tokens, 4, kernels.head).transpose(0, 1) * 3
    queries = numbered(segments)
    out = torch.empty(tokens, 4, kernels.head)
    kernels.attend(query, keys, values, 0.2, split_kv(queries, [], tokens, 2), out, cap)
    assert torch.allclose(out, expected(query, keys, values, segments, 0.2, cap), atol=1e-4)
    assert not torch.allclose(out, expected(query, keys, values, segments, 0.2), atol=1e-3)


def row(index, place, token_ids, computed):
    made = RequestState(
        Request(index, str(index), token_ids, Sampling(max_new_tokens=4)), token_ids, Noise(0, str(index)), 0.0
    )
    made.place, made.computed = place, computed
    return made


def test_rows_that_begin_alike_are_found_with_as_much_as_both_have_computed():
    text = list(range(300))
    rows = [
        row(0, 0, text, 299),
        row(1, 1, text[:200] + [7] * 50, 249),
        row(2, 2, text, 150),
        row(3, 3, [9] * 300, 299),
        row(4, 4, [9] * 299 + [1], 299),
        row(5, 5, text[: LEAST - 1] + [8] * 100, 160),
    ]
    found = PrefixGroups(lambda *_: True).among(rows)
    assert [(group.leader, dict(group.tokens)) for group in found] == [(0, {1: 200, 2: 150}), (3, {4: 299})]
    assert PrefixGroups(lambda *_: False).among(rows) == []


def test_a_prompt_is_not_shown_what_it_does_not_see():
    work = split_kv({0: [(at, 1000 + at + 1) for at in range(512)]}, [], 512, 2)
    computed = sum(int((last - first) * (end - begin)) for _, first, last, begin, end in work.pieces)
    assert computed <= 1.02 * sum(range(1001, 1513))


def test_shared_slots_are_read_once():
    queries = {0: [(0, 301)], 1: [(1, 281)], 2: [(2, 101)]}
    apart, together = (split_kv(queries, groups, 3, 1) for groups in ([], [PrefixGroup(0, {1: 256, 2: 96})]))

    def read(work):
        return sum(int(last - first) for _, first, last, _, _ in work.pieces)

    assert read(apart) == 301 + 281 + 101
    assert read(together) == 256 + (301 - 256) + (281 - 256) + (101 - 96)


def test_rows_that_share_blocks_read_the_rest_of_the_last_one_themselves():
    """Each has a copy of it: what is in memory once is read once."""
    queries = {0: [(0, 301)], 1: [(1, 281)], 2: [(2, 101)], 3: [(3, 90)]}
    group = PrefixGroup(0, {1: 250, 2: 96, 3: 40})
    holders = {0: [(0, 0, 320)], 1: [(0, 0, 192), (1, 192, 320)], 2: [(0, 0, 64), (2, 64, 128)], 3: [(3, 0, 128)]}

    def parts(row, first, last):
        cut = [(holder, max(first, begin), min(last, end)) for holder, begin, end in holders[row]]
        return [part for part in cut if part[1] < part[2]]

    work = split_kv(queries, [group], 4, 1, parts)
    found = sorted({(int(row), int(first)) for row, first, *_ in work.pieces})
    assert {row for row, _ in found} == {0, 1, 2, 3}
    starts = {row: min(first for each, first in found if each == row) for row in range(4)}
    assert starts == {0: 0, 1: 192, 2: 64, 3: 0}
    assert sum(int(last - first) for _, first, last, _, _ in work.pieces) == 192 + (301 - 192) + (281 - 192) + 37 + 90
