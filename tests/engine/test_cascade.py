"""Prefixes that rows share are read once: which rows go together, and that answers stay the same."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragspec.engine.backends import cascade, paged_attention, steps
from ragspec.engine.backends.cascade import (
    CascadeChoice,
    CascadeTensors,
    SharedPrefix,
    fill,
    most_chunks,
    shapes_of,
    shared_prefixes,
)
from ragspec.engine.backends.graphs import emulated
from ragspec.engine.backends.paged_attention import flex
from ragspec.engine.model.forward import Model
from ragspec.engine.model.layout import Segment
from ragspec.engine.proposers.base import NoProposer, RowProposer
from ragspec.records import Sampling
from ragspec.speculation.drafters.context import ContextDrafter
from tests.conftest import wide
from tests.engine.test_compiled import COMPILER
from tests.engine.test_engine import NEW, answers, ids, requests_for
from tests.engine.test_engine_models import FAMILIES, build
from tests.engine.test_paged import (  # noqa: F401 (fixtures)
    FLEX,
    SIZE,
    families,
    in_one_piece,
    paged,
    poisoned,
)

# -- which rows go together -------------------------------------------------------------------------------------------


def tables_of(texts):
    """Return tables of rows whose blocks hold letters, equal beginnings in the same blocks, and how many are whole."""
    names = {}
    width = max(map(len, texts)) + 1
    tables = np.zeros((len(texts), width), dtype=np.int64)
    for row, text in enumerate(texts):
        for at in range(len(text)):
            tables[row, at] = names.setdefault(text[: at + 1], len(names) + 1)
        tables[row, len(text)] = 1000 + row  # each writes a block of its own
    return tables, np.array([len(text) for text in texts])


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["abc"] * 4, [([0, 1, 2, 3], 3)]),
        (["abc", "x", "abd", "y", "abe", "", "z", "q"], [([0, 2, 4], 2)]),
        (["saaaa", "saaaa", "saaaa", "sbbbb", "sbbbb", "sbbbb", "", ""], [([0, 1, 2], 5), ([3, 4, 5], 5)]),
        (["sa", "sb", "sc", "sd"], [([0, 1, 2, 3], 1)]),
        (["abcd", "abcd", "a", "a", "a", "a", "a", "a"], [([0, 1, 2, 3, 4, 5, 6, 7], 1)]),
        (["a", "b", "c", "d"], []),
        (["ab", "ab"], []),  # no chunk for so few rows
    ],
)
def test_rows_that_save_most_go_together(texts, expected):
    found = shared_prefixes(*tables_of(texts), len(texts) // 4)
    assert sorted((sorted(prefix.rows), prefix.blocks) for prefix in found) == expected


@given(st.lists(st.text("ab", max_size=6), min_size=1, max_size=40), st.integers(0, 9))
def test_prefixes_are_shared_whole_and_by_rows_of_one_only(texts, chunks):
    tables, whole = tables_of(texts)
    found = shared_prefixes(tables, whole, chunks)
    rows = [row for prefix in found for row in prefix.rows]
    assert len(rows) == len(set(rows))
    assert sum(prefix.chunks for prefix in found) <= chunks
    for prefix in found:
        assert prefix.saved > 0
        assert prefix.blocks <= whole[prefix.rows].min()
        assert (tables[prefix.rows, : prefix.blocks] == tables[prefix.rows[0], : prefix.blocks]).all()


@given(st.lists(st.text("ab", max_size=6), min_size=4, max_size=70))
def test_chunks_say_for_each_row_what_is_read_for_it(texts):
    tables, whole = tables_of(texts)
    prefixes = shared_prefixes(tables, whole, most_chunks(len(texts)))
    arrays = [np.zeros(shape, dtype=np.int64) for shape in shapes_of(len(texts), tables.shape[1])]
    fill(arrays, prefixes, tables)
    chunk_tables, blocks, members, places, covered = arrays
    assert blocks[cascade.EMPTY] == 0
    in_prefix = {row: prefix.blocks for prefix in prefixes for row in prefix.rows}
    for row in range(len(texts)):
        chunk = places[row] // members.shape[1]
        assert covered[row] == blocks[chunk] == in_prefix.get(row, 0)
        assert (chunk_tables[chunk, : blocks[chunk]] == tables[row, : blocks[chunk]]).all()
        assert chunk == cascade.EMPTY or members.flatten()[places[row]] == row


def test_more_rows_than_a_chunk_holds_read_a_prefix_again():
    prefix = SharedPrefix(list(range(40)), 10)
    assert (prefix.chunks, prefix.saved) == (3, 370)


# -- exactness --------------------------------------------------------------------------------------------------------


def sharing(model, together, size=SIZE):
    """Logits of rows of which some share up to four blocks: one token each, then five, one and one."""
    model.steps.cascade = together
    model.resize(9)
    long, short, least = 4 * size + 6, 2 * size + 8, 2 * size + 1
    generator = random.Random(2)

    def run(segments):
        ids = [generator.randrange(5, 290) for segment in segments for _ in range(segment.count)]
        return model.logits(segments, ids, range(len(ids)))

    run([Segment(0, 0, long, alone=True)])
    run([Segment(4, 0, long, alone=True)])
    rows = {0: long, 1: long, 2: long, 3: long, 4: long, 5: short, 6: least}
    for row, donor in ((1, 0), (2, 0), (3, 0), (5, 4), (6, 0)):
        model.cache.share_prefix(donor, row, rows[row])
    found = []
    for count in (1, 5, 1, 1):
        found.append(run([Segment(row, start, count) for row, start in rows.items()]))
        rows = {row: start + count for row, start in rows.items()}
        if len(found) == 3:  # a row ends, and the next one in its place shares other blocks
            model.cache.drop(3)
            model.cache.share_prefix(4, 3, long)
            rows[3] = long
    return torch.cat(found)


SOME = ("llama", "mistral-sliding", "gemma2", "gpt-oss")  # plain, windows, caps, sinks


@FLEX
@pytest.mark.parametrize("family", [*SOME, *wide(*sorted(set(FAMILIES) - set(SOME)))])
def test_logits_are_those_of_rows_that_read_everything_themselves(words, family):
    """Sinks and caps among them; layers with windows read everything themselves."""
    model = Model(build(family, words), 9, None, flex(compiled=False), emulated)
    alone = sharing(model, "off")
    assert model.steps.cascaded == 0
    assert torch.allclose(sharing(model, "on"), alone, atol=1e-4, rtol=1e-4)
    assert model.steps.cascaded == 4


@FLEX
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("rows", [4, 9])
def test_answers_of_records_that_share_a_prefix_are_the_same(in_one_piece, tiny, rows, drafts):  # noqa: F811
    inner, tokenizer = paged(tiny)[0].inner, paged(tiny)[1]
    model = Model(inner, 4, None, flex(compiled=False), emulated)
    model.steps.cascade = "on"
    base = next(requests_for(tokenizer)).token_ids
    heads = [(base * 9)[:70], (base * 9)[:40] + base[5:35]]
    generator = random.Random(3)

    def requests():
        generator.seed(3)
        for i, request in enumerate(list(requests_for(tokenizer)) * 2):
            tail = [generator.randrange(5, 300) for _ in range(1 + i % 5)]
            yield type(request)(i, f"s{i}", [*heads[i % 2], *tail], Sampling(max_new_tokens=NEW))

    alone = ids(answers(in_one_piece, tiny, rows=1, requests=requests()))
    proposer = RowProposer(ContextDrafter(), 5, None) if drafts else NoProposer()
    found = answers(lambda _: (model, tokenizer), tiny, proposer, rows=rows, requests=requests())
    assert ids(found) == alone
    assert model.steps.cascaded > 5


@FLEX
@pytest.mark.parametrize("rewritten", [0, 1])
def test_a_row_that_goes_on_otherwise_no_longer_shares_its_prefix(words, rewritten):
    """Without a word to the cache: it copies the blocks that are written, as when a draft model starts a row anew."""

    def logits(way):
        model = Model(build("llama", words), 9, None, flex(compiled=False), emulated)
        model.steps.cascade = way
        model.resize(4)
        generator = random.Random(5)

        def run(segments):
            tokens = [generator.randrange(5, 290) for segment in segments for _ in range(segment.count)]
            return model.logits(segments, tokens, range(len(tokens)))

        long = 4 * SIZE + 1
        run([Segment(0, 0, long, alone=True)])
        for row in (1, 2, 3):
            model.cache.share_prefix(0, row, long)
        run([Segment(row, long, 1) for row in range(4)])
        run([Segment(rewritten, SIZE, 3 * SIZE + 2, alone=True)])
        run([Segment(rewritten, long + 1, 1)])
        return run([Segment(row, long + 1 + (row == rewritten), 2) for row in range(4)])

    assert torch.allclose(logits("on"), logits("off"), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("own_size", "prefix_size", "weight"), [(1, 1, 0), (1, 0.3, 3), (1, 0.1, 5), (2, 0.1, 5)])
def test_parts_are_merged_without_losing_bits(own_size, prefix_size, weight):
    """A few tokens of a row's own beside the mean of thousands."""
    torch.manual_seed(0)
    numbers = torch.zeros(4, dtype=torch.long)
    chunks = CascadeTensors(
        torch.zeros(2, 8, dtype=torch.long),
        torch.tensor([0, 3]),
        torch.tensor([[0, 0, 0, 0], [0, 1, 2, 3]]),
        numbers + torch.tensor([4, 5, 6, 7]),
        numbers + 3,
    )
    own = own_size * torch.randn(4, 2, 3, 64), torch.zeros(4, 2, 3)
    prefix = prefix_size * torch.randn(2, 2, 12, 64), torch.full((2, 2, 12), float(weight))
    exact, _ = chunks.merged(own, prefix)
    rounded, _ = chunks.merged((own[0].bfloat16(), own[1]), (prefix[0].bfloat16(), prefix[1]))
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() / exact.norm() < 0.0025


@FLEX
def test_cascade_attention_is_one_graph(words, monkeypatch):
    """So that inductor has few kernels to make of what stands around both calls."""
    traced = torch.compile(paged_attention._cascade_attention, backend="eager", fullgraph=True)  # noqa: SLF001
    ran = []
    monkeypatch.setattr(paged_attention, "_cascade_attention", lambda *args: ran.append(1) or traced(*args))
    model = Model(build("llama-heads-of-16", words), 9, None, flex(compiled=False))
    alone = sharing(model, "off")
    assert torch.allclose(sharing(model, "on"), alone, atol=1e-4, rtol=1e-4)
    assert len(ran) >= 4


# -- the choice -------------------------------------------------------------------------------------------------------


def test_a_trial_is_due_once_it_may_have_been_lost_already():
    choice = CascadeChoice()
    assert choice.of("a") is None
    times = [0.01 * at for at in range(200)]
    due = next(at for at, now in enumerate(times) if choice.due("a", 0.5, 0.1, now))
    assert due in (20, 21)
    assert not choice.due("b", 0.5, 0.1, times[due] + 0.01)
    assert not choice.due("b", 0.5, 0.6, times[due] + 1000)  # a pause is no lost time
    choice.learn("a", True)
    assert (choice.of("a"), choice.of("b")) == (True, None)
    now = times[due] + 2000
    for _ in range(100):  # time of steps whose way is known is not lost by others
        now += 0.5
        assert not choice.due("a", 0.5, 0.1, now)
    assert not choice.due("c", 0.5, 0.1, now + 0.01)


@FLEX
@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_way_is_chosen(words, monkeypatch, faster):
    model = Model(build("llama", words), 9, None, flex(compiled=False), emulated)
    monkeypatch.setattr(steps, "WORTH", 0.0)
    monkeypatch.setattr(CascadeChoice, "due", lambda *args: True)
    alone = sharing(model, "off")
    clock = iter(range(1000))
    ran = []
    run = model.steps._run  # noqa: SLF001
    monkeypatch.setattr(model.steps, "_run", lambda shape, *args: ran.append(shape) or run(shape, *args))

    def settled():
        now = next(clock)
        return now + (0.5 if now % 2 and ran[-1].cascade is not faster else 0.0)

    monkeypatch.setattr(model.steps, "_settled", settled)
    assert torch.allclose(sharing(model, "auto"), alone, atol=1e-4, rtol=1e-4)
    assert (model.steps.cascaded > 0) is faster
    assert [one.cascade for one in ran].count(True) >= steps.TRIALS
    assert all(one.cascade is not other.cascade for one, other in pairwise(ran[2 : 2 + 2 * steps.TRIALS]))


@FLEX
def test_memory_that_ends_in_a_trial_leaves_steps_as_they_are(words, monkeypatch):
    model = Model(build("llama", words), 9, None, flex(compiled=False), emulated)
    monkeypatch.setattr(steps, "WORTH", 0.0)
    monkeypatch.setattr(CascadeChoice, "due", lambda *args: True)
    alone = sharing(model, "off")
    run = model.steps._run  # noqa: SLF001

    def short(shape, *args):
        if shape.cascade:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(shape, *args)

    monkeypatch.setattr(model.steps, "_run", short)
    assert torch.allclose(sharing(model, "auto"), alone, atol=1e-4, rtol=1e-4)
    assert (model.steps.cascaded, model.steps.cascade) == (0, "off")
    assert "read by each of them: CUDA out of memory" in " ".join(model.steps.notes)


@FLEX
def test_a_trial_that_fails_leaves_the_other_steps_captured(words, monkeypatch):
    monkeypatch.setattr(steps, "WORTH", 0.0)
    monkeypatch.setattr(CascadeChoice, "due", lambda *args: True)
    trying = []

    def capture(work):
        if trying:
            raise RuntimeError("operation failed due to a previous error during capture")
        return emulated(work)

    model = Model(build("llama", words), 9, None, flex(compiled=False), capture)
    alone = sharing(model, "off")
    faster = model.steps._faster  # noqa: SLF001

    def trial(*args):
        trying.append(1)
        found = faster(*args)
        trying.clear()
        return found

    monkeypatch.setattr(model.steps, "_faster", trial)
    assert torch.allclose(sharing(model, "auto"), alone, atol=1e-4, rtol=1e-4)
    assert (model.steps.cascaded, model.steps.cascade, model.steps.captures) == (0, "off", True)
    assert [note.partition(":")[0] for note in model.steps.notes] == ["attention"]


def test_little_that_is_shared_is_not_tried(words, monkeypatch):
    model = Model(build("llama", words), 9, None, flex(compiled=False), emulated)
    monkeypatch.setattr(steps, "WORTH", 1e9)
    monkeypatch.setattr(CascadeChoice, "due", lambda *args: pytest.fail("tried"))
    sharing(model, "auto")
    assert model.steps.cascaded == 0


@FLEX
@COMPILER
@pytest.mark.wide
def test_compiled_flex_attention_reads_the_blocks_in_its_lists(words, monkeypatch):
    """As plain operators it looks at the mask alone. For a CPU it compiles without sums of exponentials only."""
    original, compared = paged_attention._flex_attention, []  # noqa: SLF001
    compiled = torch.compile(original, dynamic=False)

    def both(queries, keys, values, lists, rule, cap, scale, with_lse, *rest):
        plain = original(queries, keys, values, lists, rule, cap, scale, with_lse, *rest)
        alone = compiled(queries, keys, values, lists, rule, cap, scale, False, *rest)
        assert torch.allclose(plain[0] if with_lse else plain, alone, atol=1e-5, rtol=1e-5)
        compared.append(with_lse)
        return plain

    monkeypatch.setattr(paged_attention, "_flex_attention", both)
    sharing(Model(build("llama-heads-of-16", words), 9, None, flex(compiled=False)), "on")
    assert sum(compared) >= 8
