"""Captured steps on a GPU: FlexAttention compiles, graphs are captured, and answers are those of other ways."""

import pytest
import torch

from ragspec.engine.engine import Engine, EngineSettings
from ragspec.engine.kv.paged_cache import BLOCK
from ragspec.engine.model import loaded
from ragspec.engine.model.layout import Segment
from ragspec.engine.notes import Notes
from ragspec.engine.proposers.base import NoProposer, RowProposer
from ragspec.models.tokenizer import HFTokenizer
from ragspec.records import Generation
from ragspec.speculation.drafters.context import ContextDrafter
from tests.conftest import save_llama, train_tokenizer
from tests.engine.test_cascade import sharing
from tests.engine.test_engine import requests_for
from tests.engine.test_paged import logits_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.slow,  # it starts compilers
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, sample_texts):
    """A random Llama with heads of 16, the least that FlexAttention compiles for."""
    return save_llama(tmp_path_factory.mktemp("models") / "tiny", train_tokenizer(400, sample_texts), hidden=64)


def prepared(folder, dtype=torch.float32, **wishes):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    inner = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to("cuda")
    notes = Notes()
    return loaded.prepare(inner, notes, **wishes), HFTokenizer(AutoTokenizer.from_pretrained(folder)), notes


@pytest.fixture(scope="module")
def over_two_gpus(tmp_path_factory, sample_texts):
    """The same with four layers, the last two on the second GPU, and the model on one GPU."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("models") / "four"
    folder = save_llama(folder, train_tokenizer(400, sample_texts), hidden=64, layers=4)
    places = {"model.embed_tokens": 0, "model.norm": 1, "model.rotary_emb": 1, "lm_head": 1}
    places |= {f"model.layers.{i}": i // 2 for i in range(4)}
    spread = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=places).eval()
    return spread, folder, HFTokenizer(AutoTokenizer.from_pretrained(folder))


def answers(model, tokenizer, proposer=None, rows=4):
    model.resize(rows)
    engine = Engine(model, proposer or NoProposer(), tokenizer, frozenset(), EngineSettings())
    outcomes = list(engine.run(requests_for(tokenizer)))
    assert all(isinstance(outcome, Generation) for outcome in outcomes)
    return {outcome.index: outcome.token_ids for outcome in outcomes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_captured_without_a_note(tiny, dtype):
    model, tokenizer, notes = prepared(tiny, dtype)
    assert model.steps is not None, notes
    assert len(answers(model, tokenizer)) == 9
    assert model.steps.captured > 0
    assert not [note for note in notes if "graphs" in note or "FlexAttention" in note]


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_answers_are_the_same_with_drafts_without_graphs_and_with_torchs_attention(tiny, rows):
    model, tokenizer, _ = prepared(tiny)
    plain = answers(model, tokenizer, rows=rows)
    assert answers(model, tokenizer, RowProposer(ContextDrafter(), 5, None), rows=rows) == plain
    assert answers(*prepared(tiny, graphs="off")[:2], rows=rows) == plain
    assert answers(*prepared(tiny, attention="sdpa")[:2], rows=rows) == plain


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_prefixes_read_once_give_the_logits_of_rows_that_read_them_themselves(tiny, dtype, close):
    model, _, notes = prepared(tiny, dtype)
    alone = sharing(model, "off", BLOCK)
    assert torch.allclose(sharing(model, "on", BLOCK), alone, atol=close, rtol=close)
    assert model.steps.cascaded > 0
    sharing(model, "auto", BLOCK)
    assert not [note for note in notes if "FlexAttention" in note]


def test_exact_answers_are_the_same_in_bfloat16(tiny):
    model, tokenizer, _ = prepared(tiny, torch.bfloat16, exact=True)
    plain = answers(model, tokenizer, rows=1)
    for rows in (1, 4, 9):
        assert answers(model, tokenizer, rows=rows) == plain
        assert answers(model, tokenizer, RowProposer(ContextDrafter(), 5, None), rows=rows) == plain


def test_exact_logits_are_the_same_bit_for_bit(tiny):
    model, _, _ = prepared(tiny, torch.bfloat16, exact=True)
    prompt = Segment(0, 0, 300, alone=True)
    plain = logits_of(model, [prompt, *(Segment(0, at, 1) for at in range(300, 312))])
    others = [Segment(row, 0, 40 * row, alone=row % 2 == 0) for row in range(1, 9)]
    assert torch.equal(logits_of(model, [prompt, *(Segment(0, at, 1) for at in range(300, 312))], beside=others), plain)
    chunks = [Segment(0, 0, 101, alone=True), Segment(0, 101, 199, alone=True)]
    assert torch.equal(
        logits_of(model, [*chunks, Segment(0, 300, 5), Segment(0, 305, 7)], beside=others)[1:], plain[[0, 5, 12]]
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_a_model_over_two_gpus_gives_the_answers_of_one(over_two_gpus, rows):
    inner, folder, tokenizer = over_two_gpus
    notes: list[str] = []
    model = loaded.prepare(inner, notes)
    assert [note for note in notes if note.startswith(("attention", "graphs"))] == [
        "graphs: the model is spread over 2 GPUs, so its steps run without CUDA graphs, which is slower"
    ]
    plain = answers(prepared(folder)[0], tokenizer, rows=rows)
    assert answers(model, tokenizer, rows=rows) == plain
    assert answers(model, tokenizer, RowProposer(ContextDrafter(), 5, None), rows=rows) == plain
    assert {layer.keys.device.index for layer in model.cache.layers} == {0, 1}
    model.release()
