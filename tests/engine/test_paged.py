"""Rows in blocks, and steps that are captured: exact, whatever stands in memory that a step must not read."""

import random
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from operator import attrgetter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.exc import TorchDynamoException

from ragspec.engine import block_space
from ragspec.engine import engine as engine_module
from ragspec.engine.backends import paged_attention, step_shapes, steps
from ragspec.engine.backends.graphs import emulated
from ragspec.engine.backends.paged_attention import flex, gathered, takes_block_lists
from ragspec.engine.backends.step_shapes import StepShapes, step_rows, tables_width, tokens_per_row
from ragspec.engine.backends.step_shapes import packed as packed_segments
from ragspec.engine.engine import Engine, EngineSettings
from ragspec.engine.kv.block_pool import BlockPool, BlockTables
from ragspec.engine.kv.budget import KvBudget
from ragspec.engine.kv.paged_cache import PagedCache
from ragspec.engine.model import forward, loaded
from ragspec.engine.model.compiled import CompiledLayers, called_with
from ragspec.engine.model.forward import Model
from ragspec.engine.model.layout import Segment
from ragspec.engine.model.self_check import differs
from ragspec.engine.notes import Notes
from ragspec.engine.proposers.base import NoProposer, RowProposer
from ragspec.engine.proposers.draft_model import DraftModel
from ragspec.engine.scheduler import Scheduler
from ragspec.models.tokenizer import HFTokenizer
from ragspec.records import Failure, Request, Sampling
from ragspec.speculation.drafters.context import ContextDrafter
from ragspec.speculation.method_selector import MethodSelector
from ragspec.speculation.step_cost import StepCost
from tests.engine.test_compiled import COMPILER
from tests.engine.test_counts import run
from tests.engine.test_engine import NEW, Fixed, answers, ids, oracle, requests_for
from tests.engine.test_engine_models import FAMILIES, SMALL, build

index = attrgetter("index")
SIZE = 16  # tokens of a block: short texts have several
TOLERANCE = 1e-4
FLEX = pytest.mark.skipif(not takes_block_lists(), reason="this torch's FlexAttention wants more than lists of blocks")


# -- blocks -----------------------------------------------------------------------------------------------------------


class Memory:
    """Blocks that hold what was written to them, and what each row should read there."""

    def __init__(self, rows, size=4, blocks=60):
        self.tables = BlockTables(BlockPool(blocks), rows, size)
        self.held = {}
        self.texts = [[] for _ in range(rows)]
        self.size = size

    def do(self, copies):
        for copy in copies:
            for at in range(copy.tokens):
                if (copy.source, at) in self.held:
                    self.held[copy.target, at] = self.held[copy.source, at]

    def write(self, row, first, tokens):
        self.do(self.tables.reserve(row, first, first + len(tokens)))
        for position, token in enumerate(tokens, first):
            self.held[self.tables.of(row)[position // self.size], position % self.size] = token
        self.texts[row] = self.texts[row][:first] + tokens

    def share(self, donor, row, tokens):
        self.do(self.tables.share(donor, row, tokens))
        self.texts[row] = self.texts[donor][:tokens]

    def read(self, row):
        table = self.tables.of(row)
        return [self.held[table[at // self.size], at % self.size] for at in range(len(self.texts[row]))]


@given(data=st.data())
def test_a_row_reads_what_it_wrote_or_shares_whatever_the_others_do(data):
    memory = Memory(3)
    for step in range(data.draw(st.integers(1, 25))):
        row, donor = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
        if data.draw(st.booleans()):
            first = data.draw(st.integers(0, len(memory.texts[row])))
            memory.write(row, first, [step] * data.draw(st.integers(1, 9)))
        else:
            memory.share(donor, row, data.draw(st.integers(0, len(memory.texts[donor]))))
        assert [memory.read(each) for each in range(3)] == memory.texts


def test_a_shared_prefix_takes_no_blocks_of_its_own_and_all_come_back():
    pool = BlockPool(20)
    tables = BlockTables(pool, 3, 4)
    tables.reserve(0, 0, 16)
    assert pool.free == 19 - 4
    tables.share(0, 1, 16)
    assert (pool.free, tables.share(0, 2, 15)) != (0, [])
    assert pool.free == 19 - 4 - 1  # the last block of the third row is a copy
    tables.resize(0)
    assert pool.free == 19


def test_a_pool_without_free_blocks_says_so():
    tables = BlockTables(BlockPool(3), 2, 4)
    tables.reserve(0, 0, 8)
    with pytest.raises(MemoryError, match="all 2 blocks"):
        tables.reserve(1, 0, 1)


# -- shapes -----------------------------------------------------------------------------------------------------------


def test_segments_are_cut_into_rows():
    found = step_rows([(0, Segment(0, 5, 3)), (7, Segment(1, 10, 300, alone=True))], 128)
    assert [(row.row, row.start, row.count, row.packed) for row in found] == [
        (0, 5, 3, 0),
        (1, 10, 128, 7),
        (1, 138, 128, 135),
        (1, 266, 44, 263),
    ]


@pytest.mark.parametrize(
    ("counts", "blocks", "tokens"),
    [
        ([1] * 64, 0.005, 1),
        ([4] * 64, 0.005, 4),
        ([17], 0.005, 4),  # rows of 1 have less padding, but more of them read the text
        ([1] * 200 + [4] * 3, 0.0005, 1),  # padding would cost three steps' time
        ([1] * 40 + [4] * 24, 0.005, 4),
    ],
)
def test_rows_are_as_long_as_makes_the_step_quick(counts, blocks, tokens):
    assert tokens_per_row(counts, blocks) == tokens


@given(st.lists(st.integers(1, 128), min_size=1, max_size=300), st.floats(0, 1))
def test_a_step_of_any_rows_has_a_shape(counts, blocks):
    tokens = tokens_per_row(counts, blocks)
    assert tokens in step_shapes.TOKENS
    assert tokens * step_shapes.most_rows(tokens) <= step_shapes.MOST


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (1, [64]),
        (256, [256]),
        (300, [512]),  # two of 256 take as long
        (600, [512, 256]),  # 1024 would take as long as four of 256
        (1100, [1024, 256]),
        (1500, [1024, 512]),
        (1700, [2048]),
    ],
)
def test_prompts_are_cut_where_padding_takes_longer_than_another_step(tokens, sizes):
    shapes = [shape for _, shape in StepShapes(exact=False).cut([Segment(0, 0, tokens, alone=True)], 32, 0.0, 4)]
    assert [shape.packed for shape in shapes] == sizes
    launched = list(StepShapes(exact=False).cut([Segment(0, 0, tokens, alone=True)], 32, 0.0, 4, captured=False))
    assert len(launched) == 1


def shapes_of(segments, most=64, exact=False):
    cuts = StepShapes(exact).cut(segments, 32, 1e-5, most)
    return [(len(rows), shape.packed, shape.beside * shape.beside_tokens) for rows, shape in cuts]


def test_rows_that_decode_are_computed_with_prompts_where_that_is_sooner():
    decoding = [Segment(row, 600, 1) for row in range(60)]
    prompt = Segment(60, 0, 500, alone=True)
    assert shapes_of([*decoding, prompt]) == [(68, 512, 64)]
    assert shapes_of([*decoding[:1], prompt]) == [(9, 512, 64)]  # places for all rows of the run
    assert shapes_of([*decoding, prompt], most=256) == [(68, 512, 256)]
    assert shapes_of([*decoding[:1], prompt], most=384) == [(1, 0, 0), (8, 512, 0)]  # so many places cost more
    assert shapes_of([*decoding, prompt], most=600) == [(60, 0, 0), (8, 512, 0)]
    assert shapes_of([*decoding, prompt], exact=True) == [(60, 0, 0), (8, 2048, 0)]
    assert shapes_of([*decoding, replace(prompt, count=3000)]) == [(92, 2048, 64), (15, 1024, 0)]  # beside the first


def test_rows_that_verify_drafts_are_computed_with_prompts_as_far_as_they_fit():
    drafts = [Segment(row, 600, 1 + row % 4) for row in range(60)]
    prompt = Segment(60, 0, 500, alone=True)
    assert shapes_of([*drafts, prompt]) == [(68, 512, 256)]
    long = replace(drafts[0], count=17)  # five rows
    assert shapes_of([long, *drafts[1:], prompt]) == [(72, 512, 256)]
    assert shapes_of([long, *drafts[2:], replace(drafts[1], count=5), prompt]) == [(65, 0, 0), (8, 512, 0)]
    assert shapes_of([*drafts, prompt], exact=True) == [(60, 0, 0), (8, 2048, 0)]


@given(st.lists(st.integers(1, 25), max_size=64), st.integers(0, 40))
def test_drafts_are_cut_to_what_fits_beside_prompts(counts, more):
    most = min(512, max(1, len(counts)) + more)
    fitted = StepShapes(exact=False).fitted(counts, most)
    places = step_shapes.padded(most, step_shapes.ROWS)
    rows = [-(-kept // 4) for kept in fitted]
    assert sum(rows) <= places
    assert all(min(4, count) <= kept <= count for kept, count in zip(fitted, counts, strict=True))
    if fitted != counts:  # none is cut before all places are taken
        assert sum(rows) == places
    segments = [Segment(row, 600, kept) for row, kept in enumerate(fitted)]
    prompt = Segment(len(counts), 0, 500, alone=True)
    if len(counts) == most:
        assert len(shapes_of([*segments, prompt], most)) == 1


@given(st.lists(st.one_of(st.integers(1, 9), st.integers(65, 900)), min_size=1, max_size=24), st.booleans())
def test_steps_hold_each_token_once(counts, exact):
    segments = [Segment(row, 7 * row, count, alone=count > 9) for row, count in enumerate(counts)]
    seen = []
    for rows, shape in StepShapes(exact).cut(segments, 32, 1e-5, 24):
        beside = [row for row in rows if row.beside]
        assert rows[len(rows) - len(beside) :] == beside
        assert len(beside) <= shape.beside
        tiles = len(rows) - len(beside)
        assert tiles < shape.rows or not shape.packed
        assert tiles <= shape.rows
        assert sum(row.count for row in rows[:tiles]) <= (shape.packed or shape.rows * shape.tokens)
        assert all(row.count <= shape.beside_tokens for row in beside)
        for row in rows:
            seen += [(row.row, row.start + at, row.packed + at) for at in range(row.count)]
    asked = [
        (each.row, each.start + at, first + at) for first, each in packed_segments(segments) for at in range(each.count)
    ]
    assert sorted(seen) == asked


@given(st.integers(1, 5000))
def test_tables_are_wide_enough_and_have_few_widths(blocks):
    width = tables_width(blocks)
    assert blocks <= width < max(step_shapes.WIDTH + 1, 2 * blocks)
    assert width & (width - 1) == 0


# -- exactness --------------------------------------------------------------------------------------------------------


class Poisoned(steps.PagedSteps):
    """Steps before each of which all that it must not read holds something wrong."""

    def _step(self, shape):
        for step in self._steps.values():
            step.device.fill_(3)
            step.host.fill_(5)
            if step.outputs is not None:
                step.outputs.logits.fill_(float("nan"))
                step.outputs.best.fill_(7)
        used = {block for row in range(self.cache.rows) for block in self.cache.reserve_row(row, 0, 0)}
        for block in set(range(self.cache.blocks)) - used:
            for store in self.cache.memory():
                store[:, block * SIZE : (block + 1) * SIZE] = 1e4  # NaN would show even with weight 0
        return super()._step(shape)


class ShortBlocks(PagedCache):
    def __init__(self, rows, size=SIZE):
        super().__init__(rows, size)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    monkeypatch.setattr(forward, "PagedSteps", Poisoned)
    monkeypatch.setattr(forward, "PagedCache", ShortBlocks)


SINKS = {**SMALL, "head_dim": 8, "num_local_experts": 4, "sliding_window": 10}
DYNAMIC = {**SMALL, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
MORE = {"gpt-oss": ("GptOss", SINKS), "llama-dynamic": ("Llama", DYNAMIC)}


@pytest.fixture(autouse=True)
def families(monkeypatch):
    for name, family in MORE.items():
        monkeypatch.setitem(FAMILIES, name, family)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt-oss"])
@pytest.mark.parametrize("compute", [pytest.param("flex", marks=FLEX), "gathered"])
def test_a_step_computes_what_transformers_computes(words, family, compute):
    """Windows, caps and sinks among them."""
    compute = gathered if compute == "gathered" else flex(compiled=False)
    model = Model(build(family, words), 2, None, compute, emulated)
    assert differs(model, TOLERANCE) == ""
    assert model.steps.captured > 0


@FLEX
@COMPILER
@pytest.mark.wide
def test_compiled_flex_attention_reads_the_blocks_in_its_lists(words):
    """As plain operators it reads all blocks and looks at the mask alone; compiled, even for a CPU, at the lists."""
    model = Model(build("llama-heads-of-16", words), 2, None, flex(compiled=True))
    assert differs(model, TOLERANCE) == ""


def paged(folder, capture=emulated, compute=gathered):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    inner = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Model(inner, 4, None, compute, capture), HFTokenizer(AutoTokenizer.from_pretrained(folder))


@pytest.fixture
def in_blocks():
    """Models by folder, over a paged cache."""
    return cache(paged)


@pytest.fixture(scope="module")
def in_one_piece():
    """Models by folder, over a cache that has each row in one piece."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def load(folder):
        inner = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return loaded.prepare(inner), HFTokenizer(AutoTokenizer.from_pretrained(folder))

    return cache(load)


@pytest.fixture(scope="module")
def plain(in_one_piece, tiny):
    return ids(answers(in_one_piece, tiny, rows=1))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_answers_in_blocks_are_those_of_rows_in_one_piece(in_blocks, in_one_piece, tiny, plain, rows):
    assert ids(answers(in_blocks, tiny, rows=rows)) == plain
    right = RowProposer(Fixed(oracle(plain, in_one_piece, tiny)), 7, None)
    assert ids(answers(in_blocks, tiny, right, rows=rows)) == plain
    assert ids(answers(in_blocks, tiny, RowProposer(ContextDrafter(), 5, None), rows=rows)) == plain


def test_records_that_share_a_prefix_share_its_blocks(in_blocks, in_one_piece, tiny):
    tokenizer = in_blocks(tiny)[1]
    base = next(requests_for(tokenizer)).token_ids
    head = (base * 9)[:70]
    rng = random.Random(3)
    tails = [[rng.randrange(5, 300) for _ in range(1 + i % 5)] for i in range(7)]

    def requests():
        for i, (request, tail) in enumerate(zip(list(requests_for(tokenizer)) * 2, tails, strict=False)):
            yield type(request)(i, f"s{i}", [*head, *tail], Sampling(max_new_tokens=NEW))

    alone = ids(answers(in_one_piece, tiny, rows=1, requests=requests()))
    together = answers(in_blocks, tiny, rows=4, requests=requests())
    assert ids(together) == alone
    assert sum(outcome.cached_prompt_tokens > 50 for outcome in together.values()) >= 5


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_answers_are_the_same_in_blocks(in_blocks, in_one_piece, tiny, temperature):
    sampling = Sampling(max_new_tokens=NEW, temperature=temperature, seed=4)
    one = ids(answers(in_one_piece, tiny, rows=1, sampling=sampling))
    assert ids(answers(in_blocks, tiny, RowProposer(ContextDrafter(), 4, None), rows=5, sampling=sampling)) == one


def test_a_draft_model_in_blocks_changes_no_answer(in_blocks, tiny, tiny_draft, plain):
    draft, _ = in_blocks(tiny_draft)
    draft.resize(4)
    assert ids(answers(in_blocks, tiny, DraftModel(draft, 400, None, 3, None), rows=4)) == plain


@pytest.fixture
def drafts_beside(monkeypatch):
    """The number of drafts' tokens beside prompts in each step."""
    found = []
    original = StepShapes.cut

    def counted(self, segments, *args, **options):
        for rows, shape in original(self, segments, *args, **options):
            found.append(sum(row.count - 1 for row in rows if row.beside))
            yield rows, shape

    monkeypatch.setattr(StepShapes, "cut", counted)
    return found


@pytest.mark.parametrize("compute", [pytest.param("flex", marks=FLEX), "gathered"])
@pytest.mark.parametrize(
    ("rows", "chunk", "length", "sampled"), [(2, 7, 3, 99), (5, 16, 9, 99), (9, 500, 24, 99), (5, 40, 7, 3)]
)
def test_drafts_are_verified_beside_prompts(in_one_piece, tiny, drafts_beside, compute, rows, chunk, length, sampled):
    """In part right, in part wrong; also of rows that are sampled."""
    model, tokenizer = paged(tiny, compute=gathered if compute == "gathered" else flex(compiled=False))
    given = list(mixed_requests(tokenizer, rows, sampled))
    expected = ids(answers(in_one_piece, tiny, rows=1, requests=given))
    whole = {tuple(each.token_ids): expected[each.index] for each in given}

    def guess(tokens, prompt_tokens):
        right = whole[tuple(tokens[:prompt_tokens])][len(tokens) - prompt_tokens :]
        return [7 if (len(tokens) + at) % 5 == 0 else token for at, token in enumerate(right)]

    proposer = RowProposer(Fixed(guess), length, None)
    found = answers(lambda _: (model, tokenizer), tiny, proposer, rows=rows, requests=given, chunk=chunk)
    assert ids(found) == expected
    assert sum(outcome.spec.accepted for outcome in found.values()) > 40
    assert sum(drafts_beside) > 20
    assert model.steps.captured > 0


def test_steps_captured_before_layers_were_compiled_are_captured_anew(words):
    model = Model(build("llama-heads-of-16", words), 2, None, gathered, emulated)
    model.logits([Segment(0, 0, 3)], [5, 6, 7], [0, 1, 2])
    calls = []

    def traced(graph):
        bind = called_with(graph.module)
        return lambda *args: (lambda run: lambda *given: calls.append(1) or run(*given))(bind(*args))

    layers = CompiledLayers(model, traced, least=1)
    for switch, called in ((layers.on, True), (layers.off, False)):
        switch()
        calls.clear()
        assert differs(model, TOLERANCE) == ""
        assert bool(calls) is called


@pytest.mark.parametrize("rows", [2, 5, 9])
def test_a_step_started_ahead_is_of_the_rows_that_go_on(in_blocks, in_one_piece, tiny, monkeypatch, rows):
    """Rows end at their own times, and others take their places."""
    started = []
    original = engine_module.start_ahead
    monkeypatch.setattr(engine_module, "start_ahead", lambda *args: started.append(original(*args)) or started[-1])
    texts = ids(answers(in_one_piece, tiny, rows=1))
    often = Counter(token for text in texts.values() for token in text[5:])
    eos = frozenset(token for token, _ in often.most_common(12)[::4])

    def ended(load):
        model, tokenizer = load(tiny)
        model.resize(rows)
        outcomes = Engine(model, NoProposer(), tokenizer, eos).run(requests_for(tokenizer))
        return {outcome.index: (outcome.token_ids, outcome.finish_reason) for outcome in outcomes}

    expected = ended(in_one_piece)
    assert not any(started)
    assert len({len(tokens) for tokens, _ in expected.values()}) > 3
    assert ended(in_blocks) == expected
    assert sum(each is not None for each in started) > 5


@pytest.fixture
def prompts_ahead(monkeypatch):
    """The number of chunks of prompts in each step that is started ahead."""
    found = []
    original = engine_module.start_ahead

    def counted(*args):
        step = original(*args)
        found.append(len(step.prompts) if step else 0)
        return step

    monkeypatch.setattr(engine_module, "start_ahead", counted)
    return found


def mixed_requests(tokenizer, seed, sampled=99, most=30):
    """Requests of random lengths, some of which begin alike; every `sampled`th is sampled."""
    rng = random.Random(seed)
    heads = [request.token_ids for request in requests_for(tokenizer)]
    for i in range(20):
        tokens = [*rng.choice(heads[:3]), *(rng.randrange(5, 300) for _ in range(rng.randrange(1, 70)))]
        temperature = 0.0 if (i + 1) % sampled else 0.9
        sampling = Sampling(max_new_tokens=rng.randrange(1, most), temperature=temperature, seed=3)
        yield Request(i, f"m{i}", tokens, sampling)


@pytest.mark.parametrize("rows", [3, 7])
def test_a_step_after_prompts_that_were_computed_apart_is_started_ahead(
    in_one_piece, tiny, monkeypatch, prompts_ahead, rows
):
    """Its rows' tokens are in several tensors."""
    monkeypatch.setattr(StepShapes, "joins", lambda *args, **options: False)
    model, tokenizer = paged(tiny)
    expected = answers(in_one_piece, tiny, rows=1, requests=mixed_requests(tokenizer, rows))
    found = answers(lambda _: (model, tokenizer), tiny, rows=rows, requests=mixed_requests(tokenizer, rows))
    assert ids(found) == ids(expected)
    assert len(prompts_ahead) > 20
    assert not any(prompts_ahead)


@pytest.mark.parametrize("compute", [pytest.param("flex", marks=FLEX), "gathered"])
@pytest.mark.parametrize(("rows", "chunk", "sampled"), [(2, 7, 99), (5, 16, 99), (9, 500, 99), (5, 40, 6)])
def test_prompts_are_computed_in_steps_started_ahead(in_one_piece, tiny, prompts_ahead, compute, rows, chunk, sampled):
    """Also in chunks, and beside rows that need logits."""
    model, tokenizer = paged(tiny, compute=gathered if compute == "gathered" else flex(compiled=False))
    expected = answers(in_one_piece, tiny, rows=1, requests=mixed_requests(tokenizer, rows, sampled))
    requests = mixed_requests(tokenizer, rows, sampled)
    found = answers(lambda _: (model, tokenizer), tiny, rows=rows, requests=requests, chunk=chunk)
    assert ids(found) == ids(expected)
    assert sum(prompts_ahead) > 3
    assert model.steps.captured > 0


class Sometimes(MethodSelector):
    """Lets steps draft by their number, and knows it in advance."""

    def __init__(self):
        super().__init__(["context"], overlaps=True)
        self.steps = 0

    def allows(self, rows, expected_s, mixed=False, ahead=False):
        self.steps += 1
        return self.steps % 7 > 3 and not ahead

    def rests(self, mixed=False):
        return (self.steps + 1) % 7 <= 3


@pytest.mark.parametrize(("rows", "chunk", "sampled"), [(2, 7, 99), (5, 16, 99), (9, 500, 99), (5, 40, 6)])
def test_steps_are_started_ahead_while_drafts_are_paused(in_one_piece, tiny, prompts_ahead, rows, chunk, sampled):
    model, tokenizer = paged(tiny)
    given = list(mixed_requests(tokenizer, rows, sampled))
    expected = answers(in_one_piece, tiny, rows=1, requests=given)
    prompts_ahead.clear()
    proposer, trial = RowProposer(ContextDrafter(), 5, None), Sometimes()
    settings = {"requests": given, "chunk": chunk, "trial": trial, "plain": StepCost([(1, 1.0)])}
    found = answers(lambda _: (model, tokenizer), tiny, proposer, rows=rows, **settings)
    assert ids(found) == ids(expected)
    assert sum(outcome.spec.accepted for outcome in found.values()) > 0
    assert 0.1 * trial.steps < len(prompts_ahead) < 0.6 * trial.steps
    assert sum(prompts_ahead) > 0


# -- exact --------------------------------------------------------------------------------------------------------


def logits_of(model, segments, *, beside=()):
    """The logits of the last token of each segment of row 0, bit for bit, with other rows in the same steps."""
    model.resize(9)
    found = []
    for segment in segments:
        work = [segment, *beside]
        text = [(7919 * at + 11) % 300 for each in work for at in range(each.start, each.start + each.count)]
        found.append(model.logits(work, text, [segment.count - 1])[0])
    return torch.stack(found)


def test_a_tokens_bits_depend_on_the_tokens_before_it_alone(words):
    model = Model(build("llama", words), 9, None, gathered, emulated, exact=True)
    model.resize(9)
    model.cache.reserve(256)
    prompt = Segment(0, 0, 100, alone=True)
    plain = logits_of(model, [prompt, *(Segment(0, at, 1) for at in range(100, 112))])
    others = [Segment(row, 0, 3 * row, alone=row % 2 == 0) for row in range(1, 9)]
    assert torch.equal(logits_of(model, [prompt, *(Segment(0, at, 1) for at in range(100, 112))], beside=others), plain)
    drafts = [prompt, Segment(0, 100, 4), Segment(0, 104, 7), Segment(0, 111, 1)]
    assert torch.equal(logits_of(model, drafts), plain[[0, 4, 11, 12]])
    chunks = [Segment(0, 0, 37, alone=True), Segment(0, 37, 63, alone=True), Segment(0, 100, 12)]
    assert torch.equal(logits_of(model, chunks)[1:], plain[[0, 12]])


def test_a_prompts_last_token_is_computed_with_its_prompt_in_an_exact_run(tiny, monkeypatch):
    """Also if all before it is shared, or was computed in another chunk."""
    inner, tokenizer = paged(tiny)[0].inner, paged(tiny)[1]
    model = Model(inner, 4, None, gathered, emulated, exact=True)
    base = next(requests_for(tokenizer)).token_ids
    long, other = (base * 9)[:130], (base[::-1] * 9)[:127]
    first = []
    begin = model.begin

    def seen(segments, *args, **kwargs):
        first.extend(segment.alone for segment in segments if segment.start + segment.count == 130)
        return begin(segments, *args, **kwargs)

    monkeypatch.setattr(model, "begin", seen)
    requests = [Request(i, f"p{i}", each, Sampling(max_new_tokens=3)) for i, each in enumerate([long, other, long])]
    engine = Engine(model, NoProposer(), tokenizer, frozenset(), EngineSettings(chunk=256))
    found = {outcome.index: outcome.token_ids for outcome in engine.run(requests)}
    assert found[0] == found[2]
    assert first[:2] == [True, True]


def test_an_exact_run_is_the_same_whatever_is_preempted(tiny, plain):
    inner, tokenizer = paged(tiny)[0].inner, paged(tiny)[1]
    model = Model(inner, 4, None, gathered, emulated, exact=True)
    tried = []
    original = model.steps.begin

    def short(segments, *args):
        tried.append(len(segments))
        if len(tried) in (12, 13, 14):  # all rows, half of them, one, which is preempted with the others
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(segments, *args)

    model.steps.begin = short
    assert ids(answers(lambda _: (model, tokenizer), tiny, RowProposer(ContextDrafter(), 5, None), rows=4)) == plain
    assert min(tried[11:14]) == 1


# -- blocks that run short --------------------------------------------------------------------------------------------


def short_of_blocks(folder, blocks):
    """Return a model whose pool has `blocks` blocks of SIZE tokens and does not grow, and its tokenizer."""
    model, tokenizer = paged(folder)
    model.logits([Segment(0, 0, 1)], [1], [0])
    model.cache.clear(4)
    model.cache.allocate(1 + blocks)
    model.cache.fixed = True
    return model, tokenizer


def answered(model, tokenizer, requests, proposer=None, rows=4, chunk=512):
    """Return the engine's answers by index, how often a request was preempted, and how often all were."""
    model.resize(rows)
    room = KvBudget(1, (model.cache.blocks - 1) * SIZE, SIZE)
    engine = Engine(model, proposer or NoProposer(), tokenizer, frozenset(), EngineSettings(room=room, chunk=chunk))
    interrupted = []
    original = Scheduler.interrupt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "interrupt", lambda *args: interrupted.append(1) or original(*args))
        found = {outcome.index: outcome for outcome in engine.run(iter(requests))}
    return found, engine._space.preempted, len(interrupted)  # noqa: SLF001


def texts(lengths, new=24):
    """Return requests of prompts of these lengths, all different, each for `new` tokens."""
    rng = random.Random(7)
    for index, length in enumerate(lengths):
        yield Request(index, str(index), [rng.randrange(5, 300) for _ in range(length)], Sampling(max_new_tokens=new))


@pytest.mark.parametrize(("rows", "chunk"), [(3, 5), (6, 30), (4, 512)])
def test_a_request_that_loses_its_blocks_loses_what_was_started_ahead_for_it(
    in_one_piece, tiny, monkeypatch, prompts_ahead, rows, chunk
):
    """Whenever that happens."""
    model, tokenizer = short_of_blocks(tiny, 200)
    original, lost, asked = block_space.BlockSpace.make_room, [], []

    def short(space, scheduler, work):
        asked.append(1)
        if len(asked) % 7 == 0 and len(scheduler.rows()) > 2:
            place, row = scheduler.preempt_youngest()
            model.cache.drop(place)
            lost.append(row.ready)
            work = [item for item in work if item.row is not row]
        return original(space, scheduler, work)

    monkeypatch.setattr(block_space.BlockSpace, "make_room", short)
    expected = answers(in_one_piece, tiny, rows=1, requests=mixed_requests(tokenizer, rows))
    found, _, _ = answered(model, tokenizer, mixed_requests(tokenizer, rows), rows=rows, chunk=chunk)
    assert ids(found) == ids(expected)
    assert len(lost) > 5
    assert sum(prompts_ahead) > 3


@pytest.mark.parametrize("drafted", [False, True])
def test_a_lack_of_blocks_preempts_the_youngest_and_changes_no_answer(tiny, drafted):
    lengths = [30, 33, 29, 40, 35, 31, 28, 45]
    model, tokenizer = short_of_blocks(tiny, 200)
    right, none, _ = answered(model, tokenizer, texts(lengths, 60), rows=1)
    assert none == 0
    model, tokenizer = short_of_blocks(tiny, 17)  # four prompts and what the watermark wants fit, not their answers
    proposer = RowProposer(ContextDrafter(), 5, None) if drafted else None
    found, preempted, all_of_them = answered(model, tokenizer, texts(lengths, 60), proposer)
    assert ids(found) == ids(right)
    assert preempted > 0
    assert all_of_them == 0


def test_no_draft_that_a_model_sampled_is_dropped_while_others_can_give_way(in_blocks, tiny, tiny_draft, monkeypatch):
    dropped = []
    original = block_space.without_draft
    monkeypatch.setattr(block_space, "without_draft", lambda item: dropped.append(item) or original(item))
    draft, _ = in_blocks(tiny_draft)
    draft.resize(4)
    lengths = [30, 33, 29, 40, 35, 31, 28, 45]
    sampled = Sampling(max_new_tokens=60, temperature=1.0, seed=4)
    requests = [replace(one, sampling=sampled) for one in texts(lengths, 60)]
    model, tokenizer = short_of_blocks(tiny, 17)
    found, preempted, _ = answered(model, tokenizer, requests, DraftModel(draft, 400, None, 3, None))
    assert all(len(one.token_ids) == 60 for one in found.values())
    assert preempted > 0
    assert dropped == []


def test_one_long_record_takes_no_rows_from_the_others(tiny):
    lengths = [20] * 4 + [300] + [20] * 6
    model, tokenizer = short_of_blocks(tiny, 40)  # 640 tokens: four rows of 320 would need 80
    found, preempted, all_of_them = answered(model, tokenizer, texts(lengths))
    assert all(len(one.token_ids) == 24 for one in found.values())
    assert (preempted, all_of_them) == (0, 0)
    assert model.cache.rows == 4


def test_a_record_that_needs_all_blocks_is_answered_and_one_that_needs_more_is_refused(tiny):
    model, tokenizer = short_of_blocks(tiny, 20)  # 320 tokens
    found, _, _ = answered(model, tokenizer, texts([20, 290, 20, 310, 290, 20], 30))
    refused = found.pop(3)
    assert isinstance(refused, Failure)
    assert "keys and values" in refused.message
    assert all(len(one.token_ids) == 30 for one in found.values())


def test_what_finished_records_left_goes_first(tiny):
    head = [5 + i % 90 for i in range(64)]
    some = [Request(i, str(i), [*head, 100 + i], Sampling(max_new_tokens=8)) for i in range(3)]
    some += [replace(one, index=one.index + 3, id=f"x{one.index}") for one in texts([90, 90, 90, 90])]
    model, tokenizer = short_of_blocks(tiny, 200)
    right, _, _ = answered(model, tokenizer, some, rows=1)
    model, tokenizer = short_of_blocks(tiny, 16)
    found, _, all_of_them = answered(model, tokenizer, some)
    assert ids(found) == ids(right)
    assert all_of_them == 0
    assert sum(one.cached_prompt_tokens >= 64 for one in found.values()) >= 1


# -- what fails -------------------------------------------------------------------------------------------------------


def test_a_step_that_cannot_be_captured_runs_uncaptured_with_a_note(tiny, plain):
    def refuses(work):
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    model, tokenizer = paged(tiny, refuses)
    model.steps.notes = notes = Notes()
    assert ids(answers(lambda _: (model, tokenizer), tiny, rows=4)) == plain
    assert ["operation not permitted" in note for note in notes] == [True]
    assert model.steps.captured == 0


@FLEX
def test_a_capture_that_fails_while_the_model_is_checked_is_noted(words, monkeypatch):
    def refuses(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(loaded, "emulated", refuses)
    notes = []
    assert loaded.prepare(build("llama", words), notes, attention="flex", graphs="emulate").steps is not None
    assert ["operation not permitted" in note for note in notes if note.startswith("graphs")] == [True]


@FLEX
def test_a_shape_that_flex_attention_does_not_compile_for_is_computed_over_gathered_blocks(tiny, plain, monkeypatch):
    def compiles_nothing(*_, **__):
        def call(query, *args, **kwargs):
            raise TorchDynamoException("no valid triton configs")

        return call

    monkeypatch.setattr(torch, "compile", compiles_nothing)
    notes = []
    model, tokenizer = paged(tiny, compute=flex(True, notes))
    assert ids(answers(lambda _: (model, tokenizer), tiny, rows=4)) == plain
    assert ["no valid triton configs" in note for note in notes] == [True]
    assert model.steps.captured > 0


@FLEX
def test_rows_beside_prompts_are_compiled_as_rows_alone(tiny, prompts_ahead, monkeypatch):
    """FlexAttention is compiled again for other strides."""
    seen = {}

    def recorded(function, **_):
        def call(queries, *args):
            seen.setdefault(queries.shape, set()).add(queries.stride())
            with paged_attention._uncompiled():  # noqa: SLF001
                return function(queries, *args)

        return call

    monkeypatch.setattr(torch, "compile", recorded)
    model, tokenizer = paged(tiny, compute=flex(True))
    requests = mixed_requests(tokenizer, 9, 99)
    assert answers(lambda _: (model, tokenizer), tiny, rows=9, requests=requests, chunk=16)
    assert sum(prompts_ahead) > 0
    assert len(seen) > 2
    assert {len(strides) for strides in seen.values()} == {1}


def test_steps_captured_ahead_are_those_of_a_run(tiny, plain, monkeypatch):
    model, tokenizer = paged(tiny)
    model.resize(4)
    model.cache.reserve(100)
    model.logits([Segment(0, 0, 1)], [5], [0])  # its layers are known from the first forward on
    count = model.steps.capture(4, drafts=True)
    assert count == len([(1, 1), (4, 1), (16, 1), (1, 4), (4, 4), (16, 4), *3 * step_shapes.PROMPTS])
    right = RowProposer(ContextDrafter(), 5, None)
    assert ids(answers(lambda _: (model, tokenizer), tiny, right, rows=4)) == plain


def test_memory_that_runs_out_while_capturing_ahead_ends_no_run(tiny):
    tried = []

    def short(work):
        tried.append(1)
        if len(tried) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return emulated(work)

    model, _ = paged(tiny, short)
    model.steps.notes = notes = Notes()
    for _ in range(2):  # its layers are known from the first forward on
        model.logits([Segment(0, 0, 1)], [5], [0])
    assert model.steps.capture(4, drafts=True) == 2
    assert len(tried) > 3, "smaller ones are tried"
    assert ["CUDA out of memory" in note for note in notes] == [True]


@pytest.mark.parametrize("logits", [3, 20, 60])
def test_a_step_that_memory_does_not_suffice_to_capture_runs_uncaptured(tiny, plain, logits):
    """Nor is a capture tried again that needs as much."""
    tried = []

    def short(work):
        replay, outputs = emulated(work)
        tried.append(len(outputs.logits))
        if len(outputs.logits) > logits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return replay, outputs

    model, tokenizer = paged(tiny, short)
    model.steps.notes = notes = Notes()
    drafts = RowProposer(ContextDrafter(), 5, None)
    assert ids(answers(lambda _: (model, tokenizer), tiny, drafts, rows=4)) == plain
    failed = [each for each in tried if each > logits]
    assert failed == sorted(failed, reverse=True)
    assert len(failed) > 0
    assert ["CUDA out of memory" in note for note in notes] == [True]


def test_captured_steps_give_way_to_one_that_is_not(tiny, plain):
    captures, replays, short = [], [], []

    def capture(work):
        captures.append(1)
        if len(captures) == 4:
            short.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        replays.append(1)
        replay, outputs = emulated(work)
        replays.pop()

        def counted():
            replays.append(1)
            replay()
            replays.pop()

        return counted, outputs

    def compute(*args):
        if short and not replays:
            short.clear()
            freed.append(model.steps.captured)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gathered(*args)

    freed = []
    model, tokenizer = paged(tiny, capture, compute)
    model.steps.notes = Notes()
    assert ids(answers(lambda _: (model, tokenizer), tiny, rows=4)) == plain
    assert len(freed) == 1 <= freed[0]


def test_captured_steps_write_their_logits_to_one_place(tiny):
    seen = []

    def capture(work):
        replay, outputs = emulated(work)
        seen.append(outputs.logits)
        return replay, outputs

    model, _ = paged(tiny, capture)
    model.resize(4)
    model.cache.reserve(100)
    model.logits([Segment(0, 0, 1)], [5], [0])
    seen.clear()
    model.steps.forget()
    assert model.steps.capture(4, drafts=True) == len(seen) > 5
    assert len({logits.data_ptr() for logits in seen}) == 1
    assert len(set(map(len, seen))) > 3


def test_steps_of_narrower_tables_are_dropped_where_a_row_outgrows_them(tiny, plain):
    model, tokenizer = paged(tiny)
    assert ids(answers(lambda _: (model, tokenizer), tiny, rows=4)) == plain
    before = model.steps.captured
    model.cache.reserve(model.cache.size * (step_shapes.WIDTH + 1))
    model.logits([Segment(0, 0, 1)], [5], [0])
    assert model.steps.captured == 1 < before
    for _ in range(2):
        assert ids(answers(lambda _: (model, tokenizer), tiny, rows=4)) == plain
        assert model.steps.captured in (before, before + 1)


def test_what_the_reader_of_answers_does_is_no_steps_time(in_blocks, tiny):
    model, tokenizer = in_blocks(tiny)
    model.resize(2)
    engine = Engine(model, NoProposer(), tokenizer, frozenset())
    later, clock = [], time.perf_counter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: clock() + 1000 * len(later))
        for outcome in engine.run(requests_for(tokenizer)):
            later.append(outcome)
    assert len(later) == 9
    assert engine.clock.decode_s + engine.clock.prefill_s < 1000


def test_rows_made_shorter_give_their_blocks_back():
    tables = BlockTables(BlockPool(9), 2, 4)
    tables.reserve(0, 0, 32)
    tables.resize(4, 8)
    for row in range(1, 4):
        tables.reserve(row, 0, 8)
    assert len({block for row in range(4) for block in tables.of(row)}) == 8


def test_a_lack_of_blocks_changes_no_table():
    pool = BlockPool(5)
    tables = BlockTables(pool, 2, 4)
    tables.reserve(0, 0, 12)
    tables.share(0, 1, 12)
    before = list(tables.of(1)), pool.free
    with pytest.raises(MemoryError):
        tables.reserve(1, 0, 12)
    assert (tables.of(1), pool.free) == before


def test_memory_that_runs_out_while_capturing_is_no_reason_to_stop_capturing(tiny, plain):
    tried = []

    def short(work):
        tried.append(1)
        if len(tried) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return emulated(work)

    model, tokenizer = paged(tiny, short)
    assert ids(answers(lambda _: (model, tokenizer), tiny, rows=4)) == plain
    assert model.steps.captured > 0


@FLEX
def test_a_model_that_blocks_do_not_fit_gets_torchs_own_attention_with_the_reason(words):
    notes = []
    model = loaded.prepare(build("llama-dynamic", words), notes, attention="flex")
    assert model.steps is None
    assert any(note.startswith("attention: FlexAttention, which is faster") and "frequencies" in note for note in notes)


@pytest.mark.skipif(takes_block_lists(), reason="this torch's FlexAttention can be used")
def test_an_older_torch_gets_torchs_own_attention_with_the_reason(words):
    notes = []
    assert loaded.prepare(build("llama", words), notes, attention="flex").steps is None
    assert any("lists of blocks" in note for note in notes)


# -- the runner -------------------------------------------------------------------------------------------------------


@FLEX
@pytest.mark.parametrize("method", ["none", "context"])
def test_a_run_in_blocks_gives_the_same_answers_and_says_what_computed_them(tiny, method):
    sampling = {"max_new_tokens": 20}
    expected, _, _ = run("huggingface", tiny, "none", sampling, batch_size=3)
    got, _, runner = run("huggingface", tiny, method, sampling, batch_size=3, attention="flex", graphs="emulate")
    assert [each.token_ids for each in sorted(got, key=index)] == [
        each.token_ids for each in sorted(expected, key=index)
    ]
    about = runner.about()
    assert about["attention"] == "flex"
    assert about["captured_steps"] > 0
