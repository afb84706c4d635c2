"""Compiled layers: captured from the model's own code, exact, and left alone where something is in the way."""

import shutil

import pytest
import torch

from ragspec.engine import prepared, speedup
from ragspec.engine.capture import NotCaptured
from ragspec.engine.compiled import CompiledLayers
from ragspec.engine.decode import Engine, EngineSettings
from ragspec.engine.layout import Segment
from ragspec.engine.proposers import ByRow, NoDrafts
from ragspec.models.tokenizer import HFTokenizer
from ragspec.speculation.drafters.context import ContextDrafter
from tests.conftest import train_tokenizer
from tests.engine.test_engine_models import build, requests_for

CAPTURED = [
    "llama-heads-of-16",
    "llama-bias",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma3-sliding",
    "mistral-sliding",
    "gpt_neox",
]


@pytest.fixture(scope="module")
def words(sample_texts):
    return HFTokenizer(train_tokenizer(400, sample_texts))


def interpreted(graph):
    """Stand in for inductor: the graph, operator by operator."""
    return graph.module


def answers(model, words, rows, proposer):
    model.resize(rows)
    engine = Engine(model, proposer, words, frozenset(), EngineSettings(chunk=32))
    return {outcome.index: outcome.token_ids for outcome in engine.run(requests_for(words))}


@pytest.mark.parametrize("family", CAPTURED)
def test_captured_layers_answer_as_the_model_does(family, words):
    model = prepared.prepare(build(family, words))
    expected = answers(model, words, 1, NoDrafts())
    layers = CompiledLayers(model, interpreted)
    layers.on()
    assert answers(model, words, 1, NoDrafts()) == expected
    assert answers(model, words, 3, ByRow(ContextDrafter(), 4, None)) == expected
    layers.off()
    assert answers(model, words, 3, NoDrafts()) == expected


def test_layers_of_one_kind_are_compiled_once(words):
    compiled = []
    CompiledLayers(prepared.prepare(build("llama-heads-of-16", words)), lambda graph: compiled.append(graph))
    assert len(compiled) == 1
    compiled.clear()
    CompiledLayers(prepared.prepare(build("gemma3-sliding", words)), lambda graph: compiled.append(graph))
    assert len(compiled) == 2, "layers that slide and layers that do not"


def test_the_models_own_forward_is_not_compiled(words):
    model = prepared.prepare(build("llama", words))
    CompiledLayers(model, interpreted).on()
    with model.as_it_was():
        assert model.compiled is None
        assert not any("forward" in vars(layer) for layer in model.layers)
    assert model.compiled is not None
    model.release()
    assert not any("forward" in vars(layer) for layer in model.layers)


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv(speedup.FOLDER, str(tmp_path / "inductor"))
    return tmp_path


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_a_model_that_answers_the_same(words, cached):
    model = prepared.prepare(build("llama-heads-of-16", words))
    expected = answers(model, words, 1, NoDrafts())
    notes = []
    speedup.compile_layers(model, 3, None, "on", notes)
    assert "kept" in notes[0]
    assert model.compiled is not None
    assert answers(model, words, 3, ByRow(ContextDrafter(), 4, None)) == expected
    assert float((cached / "inductor" / "seconds").read_text()) > 0


@pytest.mark.parametrize(
    ("wrong", "note"),
    [
        (NotCaptured("attends in a way that a graph does not show"), "it attends in a way that a graph does not show"),
        (RuntimeError("g++: not\nfound"), "it does not compile (RuntimeError: g++: not found)"),
    ],
)
def test_what_does_not_compile_runs_uncompiled_and_says_why(wrong, note, words, cached, monkeypatch):
    def fail(graph):
        raise wrong

    monkeypatch.setattr(speedup, "inductor", fail)
    model, notes = prepared.prepare(build("llama", words)), []
    speedup.compile_layers(model, 2, None, "on", notes)
    assert notes == [f"compile: the model's layers run uncompiled: {note}"]
    assert model.compiled is None


def test_layers_that_compute_something_else_compiled_are_not_used(words, cached, monkeypatch):
    monkeypatch.setattr(speedup, "inductor", lambda graph: lambda *given: [1.01 * one for one in graph.module(*given)])
    model, notes = prepared.prepare(build("llama", words)), []
    speedup.compile_layers(model, 2, None, "on", notes)
    assert "computes different logits" in notes[0]
    assert model.compiled is None


def test_auto_compiles_only_what_the_work_ahead_earns(words, cached, monkeypatch):
    monkeypatch.setattr(speedup, "inductor", interpreted)
    model = prepared.prepare(build("llama", words))
    for tokens, wish in ((None, "auto"), (100, "auto"), (10**12, "off")):
        notes = []
        speedup.compile_layers(model, 2, tokens, wish, notes)
        assert notes == []
    speedup.compile_layers(model, 2, 10**12, "auto", notes)
    assert len(notes) == 1


def test_a_cache_folder_that_cannot_be_written_is_a_note(words, cached, monkeypatch):
    (cached / "inductor").write_text("a file")
    monkeypatch.setattr(speedup, "inductor", interpreted)
    model, notes = prepared.prepare(build("llama", words)), []
    speedup.compile_layers(model, 2, None, "on", notes)
    assert any("cannot be written" in note for note in notes)
    assert model.compiled is not None


def test_one_token_alone_is_padded(words):
    model = prepared.prepare(build("llama-heads-of-16", words))
    plain = [model.logits([Segment(0, at, 1)], [7 + at], [0]) for at in range(3)]
    CompiledLayers(model, interpreted).on()
    model.resize(1)
    padded = [model.logits([Segment(0, at, 1)], [7 + at], [0]) for at in range(3)]
    assert torch.allclose(torch.cat(plain), torch.cat(padded), atol=1e-4)
