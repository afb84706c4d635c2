"""Compiled layers: captured from the model's own code, exact, and left alone where something is in the way."""

import importlib
import json
import shutil
import time

import pytest
import torch

from ragspec.engine.engine import Engine, EngineSettings
from ragspec.engine.model import compiled as speedup
from ragspec.engine.model import loaded as prepared
from ragspec.engine.model.compiled import CompiledLayers, called_with
from ragspec.engine.model.layer_graph import NotCaptured
from ragspec.engine.model.layout import Segment
from ragspec.engine.native import layer
from ragspec.engine.native.layer import Builder
from ragspec.engine.profiler import Profiler
from ragspec.engine.proposers.base import NoProposer, RowProposer
from ragspec.host.compiler import Unbuilt
from ragspec.models.tokenizer import HFTokenizer
from ragspec.speculation.drafters.context import ContextDrafter
from tests.conftest import train_tokenizer, wide
from tests.engine.test_engine_models import build, requests_for

COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
CAPTURED = [
    "llama-heads-of-16",
    "qwen3",
    "gemma3-sliding",
    "gpt_neox",
    *wide("llama-bias", "qwen2", "phi3", "mistral-sliding"),
]


@pytest.fixture(scope="module")
def words(sample_texts):
    return HFTokenizer(train_tokenizer(400, sample_texts))


def interpreted(graph):
    """Stand in for inductor: the graph, operator by operator."""
    return called_with(graph.module)


def captured(model):
    return CompiledLayers(model, interpreted, least=2)


def fused(model):
    return CompiledLayers(model, Builder(model))


def answers(model, words, rows, proposer):
    model.resize(rows)
    engine = Engine(model, proposer, words, frozenset(), EngineSettings(chunk=32))
    return {outcome.index: outcome.token_ids for outcome in engine.run(requests_for(words))}


@pytest.mark.parametrize("family", CAPTURED)
@pytest.mark.parametrize("compiled", [captured, pytest.param(fused, marks=COMPILER)])
def test_captured_layers_answer_as_the_model_does(family, compiled, words):
    model = prepared.prepare(build(family, words))
    expected = answers(model, words, 1, NoProposer())
    layers = compiled(model)
    layers.on()
    assert answers(model, words, 1, NoProposer()) == expected
    assert answers(model, words, 3, RowProposer(ContextDrafter(), 4, None)) == expected
    layers.off()
    assert answers(model, words, 3, NoProposer()) == expected


@COMPILER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_16_bits_is_read_in_them_and_answers_as_in_32(words, dtype):
    inner = build("llama-heads-of-16", words)
    for parameter in inner.parameters():
        parameter.data = parameter.data.to(dtype).float()
    model = prepared.prepare(inner)
    with model.as_it_was() as stock:
        expected = {
            request.index: stock.generate(
                torch.tensor([request.token_ids]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(request.token_ids) :].tolist()
            for request in requests_for(words)
        }
    packed = {model.kernels.pack(each.weight).dtype for each in model.inner.modules() if hasattr(each, "out_features")}
    assert packed == {dtype}
    layers = fused(model)
    for switch in (layers.off, layers.on):
        switch()
        assert answers(model, words, 3, RowProposer(ContextDrafter(), 4, None)) == expected
    with Profiler(model, 1.0, 1e30) as watch:  # bound by bytes
        model.resize(1)
        model.logits([Segment(0, 0, 1)], [1], [0])
    (linear,) = [phase["parts"]["linear layers"] for phase in watch.to_json().values() if phase["steps"]]
    weights = sum(each.weight.numel() for each in model.inner.modules() if hasattr(each, "out_features"))
    assert linear["bound_s"] == pytest.approx(2 * weights)


def test_layers_of_one_kind_are_compiled_once(words):
    compiled = []

    def note(graph):
        compiled.append(graph)
        return interpreted(graph)

    CompiledLayers(prepared.prepare(build("llama-heads-of-16", words)), note)
    assert len(compiled) == 1
    compiled.clear()
    CompiledLayers(prepared.prepare(build("gemma3-sliding", words)), note)
    assert len(compiled) == 2, "layers that slide and layers that do not"


def test_the_models_own_forward_is_not_compiled(words):
    model = prepared.prepare(build("llama", words))
    captured(model).on()
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


def without_kernels(model):
    """Return a model whose layers only inductor can compile, as on a GPU."""
    model.kernels = None
    return model


@COMPILER
@pytest.mark.parametrize(("way", "before"), [("kernels", lambda model: model), *wide(("inductor", without_kernels))])
def test_a_compiled_model_answers_the_same(way, before, words, cached):
    if way == "inductor" and not hasattr(importlib.import_module("torch._inductor"), "standalone_compile"):
        pytest.skip("this torch has no standalone_compile")
    model = before(prepared.prepare(build("llama-heads-of-16", words)))
    expected = answers(model, words, 1, NoProposer())
    notes = []
    speedup.compile_layers(model, 3, None, "on", notes)
    assert "kept" in notes[0]
    assert ("of one call each" in notes[0]) is (way == "kernels")
    assert model.compiled is not None
    assert answers(model, words, 3, RowProposer(ContextDrafter(), 4, None)) == expected
    (known,) = (cached / way).glob("*.json")
    found = json.loads(known.read_text())
    assert found["seconds"] > 0
    assert 0 < found["gain"] < 1


@pytest.mark.parametrize("known", ['{"seconds": 0.0, "gain": 0.5}', '{"seconds": 1e9, "gain": 0.5}', "nonsense", "[]"])
def test_what_was_found_the_last_time_says_whether_compiling_is_earned(known, words, cached, monkeypatch):
    monkeypatch.setattr(speedup, "inductor", interpreted)
    speedup.compile_layers(without_kernels(prepared.prepare(build("llama", words))), 2, None, "on", [])
    (path,) = (cached / "inductor").glob("*.json")
    path.write_text(known)
    model, notes = without_kernels(prepared.prepare(build("llama", words))), []
    speedup.compile_layers(model, 2, 100, "auto", notes)
    assert bool(notes) is known.startswith('{"seconds": 0.0')


def test_steps_that_wait_for_a_core_earn_no_compiling(words, cached, monkeypatch):
    monkeypatch.setattr(speedup, "inductor", interpreted)
    model = without_kernels(prepared.prepare(build("llama", words)))
    compute, waited, notes = model.logits, [], []

    def waits(*args):
        waited.append(time.sleep(0.1))
        return compute(*args)

    monkeypatch.setattr(model, "logits", waits)
    tokens = int(2 * speedup.INDUCTOR.seconds * 2 / (speedup.INDUCTOR.gain * 0.1))
    speedup.compile_layers(model, 2, tokens, "auto", notes)
    assert notes == []
    assert len(waited) > speedup.GLANCES, "by the clock, compiling would save twice what it takes"


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
    model, notes = without_kernels(prepared.prepare(build("llama", words))), []
    speedup.compile_layers(model, 2, None, "on", notes)
    assert notes == [f"compile: the model's layers run uncompiled: {note}"]
    assert model.compiled is None


@COMPILER
@pytest.mark.parametrize("wrong", [NotCaptured("computes conv1d, which kernels do not"), Unbuilt("g++ failed")])
def test_what_kernels_cannot_run_is_left_to_inductor(wrong, words, cached, monkeypatch):
    class Fails(Builder):
        def __call__(self, graph):
            raise wrong

    monkeypatch.setattr(speedup, "Builder", Fails)
    monkeypatch.setattr(speedup, "inductor", interpreted)
    model, notes = prepared.prepare(build("llama", words)), []
    expected = answers(model, words, 2, NoProposer())
    speedup.compile_layers(model, 2, None, "on", notes)
    assert "compiled layers take" in notes[0]
    assert answers(model, words, 2, NoProposer()) == expected


def test_layers_that_compute_something_else_compiled_are_not_used(words, cached, monkeypatch):
    def wrong(graph):
        return called_with(lambda *given: [1.01 * one for one in graph.module(*given)])

    monkeypatch.setattr(speedup, "inductor", wrong)
    model, notes = without_kernels(prepared.prepare(build("llama", words))), []
    speedup.compile_layers(model, 2, None, "on", notes)
    assert "computes different logits" in notes[0]
    assert model.compiled is None


@pytest.mark.wide
@COMPILER
def test_kernels_that_compute_something_else_are_not_used(words, cached, monkeypatch):
    source = layer.source_of
    monkeypatch.setattr(
        layer, "source_of", lambda program: (source(program)[0].replace("silu(a)", "a"), source(program)[1])
    )
    monkeypatch.setattr(speedup, "inductor", interpreted)
    model, notes = prepared.prepare(build("llama", words)), []
    speedup.compile_layers(model, 2, None, "on", notes)
    assert "compiled layers take" in notes[0], "inductor's turn"


def watched(builder, runs):
    """Return a builder whose layers say in `runs` how many tokens they compute, each time that they do."""

    def build_graph(graph):
        bind = builder(graph)

        def bound(*given):
            run = bind(*given)

            def ran(tensors, rule):
                results = run(tensors, rule)
                if results is not None:
                    runs.append(tensors[0].shape[1])
                return results

            return ran

        return bound

    return build_graph


@COMPILER
def test_forwards_that_kernels_are_slow_at_are_left_to_the_layers(words):
    model = prepared.prepare(build("llama-heads-of-16", words))
    builder, runs = Builder(model), []
    CompiledLayers(model, watched(builder, runs)).on()
    for most, expected in ((None, {4, 9}), (8, {4})):
        builder.most = most
        runs.clear()
        model.resize(1)
        model.logits([Segment(0, 0, 9, alone=True)], range(9), range(9))
        model.logits([Segment(0, 9, 4)], range(4), range(4))
        assert set(runs) == expected


@COMPILER
def test_a_last_layer_that_computes_some_tokens_only_is_left_alone(words):
    model = prepared.prepare(build("llama-heads-of-16", words))
    plain = model.logits([Segment(0, 0, 9, alone=True)], range(9), [8])
    layers, runs = len(model.layers), []
    CompiledLayers(model, watched(Builder(model), runs)).on()
    for wanted, expected in (([8], layers - 1), (range(9), layers)):
        runs.clear()
        model.resize(1)
        logits = model.logits([Segment(0, 0, 9, alone=True)], range(9), wanted)
        assert len(runs) == expected
        assert torch.allclose(logits[-1:], plain, atol=1e-4)


def test_auto_compiles_only_what_the_work_ahead_earns(words, cached, monkeypatch):
    monkeypatch.setattr(speedup, "inductor", interpreted)
    model = without_kernels(prepared.prepare(build("llama", words)))
    for tokens, wish in ((None, "auto"), (100, "auto"), (10**12, "off")):
        notes = []
        speedup.compile_layers(model, 2, tokens, wish, notes)
        assert notes == []
    speedup.compile_layers(model, 2, 10**12, "auto", notes)
    assert len(notes) == 1


def test_a_cache_folder_that_cannot_be_written_is_a_note(words, cached, monkeypatch):
    (cached / "inductor").write_text("a file")
    monkeypatch.setattr(speedup, "inductor", interpreted)
    model, notes = without_kernels(prepared.prepare(build("llama", words))), []
    speedup.compile_layers(model, 2, None, "on", notes)
    assert any("is not writable" in note for note in notes)
    assert model.compiled is not None


@pytest.mark.parametrize("compiled", [captured, pytest.param(fused, marks=COMPILER)])
def test_one_token_alone_is_computed_too(compiled, words):
    model = prepared.prepare(build("llama-heads-of-16", words))
    plain = [model.logits([Segment(0, at, 1)], [7 + at], [0]) for at in range(3)]
    compiled(model).on()
    model.resize(1)
    alone = [model.logits([Segment(0, at, 1)], [7 + at], [0]) for at in range(3)]
    assert torch.allclose(torch.cat(plain), torch.cat(alone), atol=1e-4)
