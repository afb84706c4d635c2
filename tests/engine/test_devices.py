"""A model whose layers accelerate has spread over several GPUs: its answers, and every operator on one of them.

The GPUs are those of tests/devices.py; tests/gpu/test_steps.py wants real ones.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from ragspec.config.sections import SpeculationConfig
from ragspec.engine import backend as backend_module
from ragspec.engine.backend import EngineBackend, Speculation
from ragspec.engine.backends import paged_attention
from ragspec.engine.backends.graphs import emulated
from ragspec.engine.backends.paged_attention import PagedAttention, StepTensors, flex, gathered
from ragspec.engine.backends.steps import PagedSteps
from ragspec.engine.kv.budget import budget_over
from ragspec.engine.kv.cache import LayerCache
from ragspec.engine.kv.paged_cache import BLOCK, PagedCache
from ragspec.engine.kv.prefix_store import PrefixStore
from ragspec.engine.model import loaded
from ragspec.engine.model.devices import devices_of, spread
from ragspec.engine.model.forward import Model
from ragspec.engine.model.layout import Segment
from ragspec.engine.model.self_check import differs
from ragspec.records import Generation, Request, Sampling
from ragspec.runners.huggingface import checkpoint
from ragspec.runners.huggingface.args import Args, only_stock
from tests.devices import DevicesDiffer, at_once, place, several_gpus, spread_over
from tests.engine.test_cascade import sharing
from tests.engine.test_engine import requests_for
from tests.engine.test_engine_models import build
from tests.engine.test_paged import FLEX, TOLERANCE, families  # noqa: F401 (a fixture)

FAMILIES = ("llama-heads-of-16", "mistral-sliding", "gemma3-sliding", "gemma2", "gpt-oss")
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
GRAPHS = "graphs: the model is spread over 2 GPUs, so its steps run without CUDA graphs, which is slower"


@pytest.fixture
def gpus():
    with several_gpus(free=16 << 20):
        yield


@pytest.fixture
def as_on_gpus(monkeypatch):
    """What compiles for GPUs that are there."""
    monkeypatch.setattr(loaded, "flex", lambda compiled, notes, exact: gathered)


def test_the_gpus_of_these_tests_are_as_particular_as_real_ones(gpus):
    one, other = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    places = torch.tensor([2, 0], device="cuda:1")
    for meet in (
        lambda: one + other,
        lambda: one[places],
        lambda: one.index_select(0, places),
        lambda: one.new_zeros(3).index_copy_(0, places, other[:2]),
        lambda: torch.cat([one, other]),
        lambda: one + torch.ones(3),
    ):
        with pytest.raises(DevicesDiffer):
            meet()
    assert (one + other.to("cuda:0")).tolist() == [2.0, 2.0, 2.0]
    assert other[places].device == SECOND


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compute", [pytest.param("flex", marks=FLEX), "gathered"])
def test_a_step_of_a_spread_model_computes_what_transformers_computes(words, gpus, monkeypatch, family, compute):
    """Windows, caps and sinks among them; on two GPUs and on three."""
    monkeypatch.setattr(paged_attention, "_flex_attention", at_once(paged_attention._flex_attention))  # noqa: SLF001
    for devices in (2, 3):
        inner = spread_over(build(family, words), devices)
        inner.config._experts_implementation = "eager"  # the others ask which kind of device it is  # noqa: SLF001
        model = Model(inner, 2, None, gathered if compute == "gathered" else flex(compiled=False))
        assert differs(model, TOLERANCE) == ""
        assert len(set(map(str, model.cache.bytes_by_device()))) == devices
        assert model.cache.bytes_by_device().total() == model.cache.bytes_per_token


@FLEX
def test_prefixes_are_read_once_on_every_device(words, gpus, monkeypatch):
    monkeypatch.setattr(paged_attention, "_flex_attention", at_once(paged_attention._flex_attention))  # noqa: SLF001
    model = Model(spread_over(build("llama-heads-of-16", words), 2), 9, None, flex(compiled=False))
    alone = sharing(model, "off", BLOCK)
    assert torch.allclose(sharing(model, "on", BLOCK), alone, atol=TOLERANCE, rtol=TOLERANCE)
    assert model.steps.cascaded > 0


def test_the_output_layer_may_be_on_another_device_than_the_last_layer(words, gpus):
    model = Model(spread_over(build("llama", words), 2, output="cuda:0"), 2, None, gathered, emulated)
    assert differs(model, TOLERANCE) == ""


def test_only_what_is_wanted_goes_through_the_output_layer(words, gpus):
    inner = spread_over(build("llama", words), 2)
    model, rows = Model(inner, 2, None, gathered), []
    inner.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[1]))
    model.logits([Segment(0, 0, 200, alone=True)], [7] * 200, [199])
    assert rows[0] < 70


def test_every_layer_is_written_where_it_is_and_stacked_with_those_of_its_device(words, gpus):
    model = Model(spread_over(build("llama-heads-of-16", words), 2), 2, None, gathered)
    model.logits([Segment(0, 0, 3)], [5, 6, 7], [2])
    cache = model.cache
    held = [each.tolist() for each in cache.read(0, 0, 3)]
    cache.allocate(9)
    assert [layer.keys.device for layer in cache.layers] == [FIRST, FIRST, SECOND, SECOND]
    assert [(stack.device, len(stack)) for stack in cache._stacks] == [(FIRST, 4), (SECOND, 4)]  # noqa: SLF001
    assert [each.tolist() for each in cache.read(0, 0, 3)] == held
    assert cache.share_prefix(0, 1, 3) == 3  # a copy of a part of a block, on both
    assert [each.tolist() for each in cache.read(1, 0, 3)] == held


def test_what_was_read_from_all_devices_is_written_to_them_again(words, gpus):
    model = Model(spread_over(build("llama", words), 3), 2, None, gathered)
    tokens = [9, 8, 7, 6, 5]
    expected = model.logits([Segment(0, 0, 5), Segment(0, 5, 1)][:1], tokens, [4])
    kept = model.cache.read(0, 0, 4)
    assert {each.device.type for each in kept} == {"cpu"}
    model.resize(2)
    model.cache.reserve(8)
    model.cache.fill(1, 0, [each.to(FIRST) for each in kept])
    got = model.logits([Segment(1, 4, 1)], tokens[4:], [0])
    assert torch.allclose(got, expected, atol=TOLERANCE)


def test_a_steps_tensors_are_copied_to_a_device_once(words, gpus, monkeypatch):
    copied, original = [], StepTensors.to
    monkeypatch.setattr(StepTensors, "to", lambda step, device: copied.append(device) or original(step, device))
    model = Model(spread_over(build("gemma3-sliding", words), 3), 2, None, gathered)
    model.logits([Segment(0, 0, 3)], [5, 6, 7], [2])
    assert copied == [SECOND, torch.device("cuda:2")]


def test_nothing_is_copied_or_hooked_on_one_device(words, monkeypatch):
    monkeypatch.setattr(PagedAttention, "on", lambda *args: pytest.fail("copied"))
    monkeypatch.setattr(Model, "_narrow_output_layer", lambda *args: pytest.fail("hooked"))
    inner = build("llama", words)
    model = Model(inner, 2, None, gathered, emulated)
    assert not model.spread
    assert spread(inner) == ""
    assert differs(model, TOLERANCE) == ""
    assert not inner.lm_head._forward_pre_hooks  # noqa: SLF001


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_fullest_device_decides_how_many_tokens_fit():
    sizes = {FIRST: 300, SECOND: 100}
    assert budget_over({FIRST: 3000, SECOND: 9000}, sizes) == 10 * 400
    assert budget_over({FIRST: 9000, SECOND: 500}, sizes) == 5 * 400
    assert budget_over({FIRST: 12345}, {FIRST: 7}) == 12345  # on one device, all of it


def test_layers_of_one_size_on_two_devices_are_two_stacks():
    cache = PagedCache(2, 4)
    for device in ("cpu", "meta", "cpu"):
        cache.layers.append(LayerCache(*(torch.zeros(1, 4, 8, device=device) for _ in range(2))))
    cache.allocate(5)
    assert [(stack.device.type, len(stack)) for stack in cache._stacks] == [("cpu", 4), ("meta", 2)]  # noqa: SLF001
    assert [layer.keys.device.type for layer in cache.layers] == ["cpu", "meta", "cpu"]
    assert cache.bytes_by_device() == Counter({torch.device("cpu"): 128, torch.device("meta"): 64})


# -- the engine -------------------------------------------------------------------------------------------------------


def engine(inner, words, method="none", draft=None, **settings):
    speculation = Speculation(method, 3, draft=draft)
    return EngineBackend(inner, words, frozenset([0]), speculation, **{"rows": 3, **settings})


def answers(backend, words):
    outcomes = list(backend.generate(requests_for(words)))
    assert all(isinstance(outcome, Generation) for outcome in outcomes)
    return {outcome.index: outcome.token_ids for outcome in outcomes}


@pytest.fixture(scope="module")
def plain(words):
    return answers(engine(build("llama", words), words), words)


@pytest.mark.parametrize("method", ["none", "context", "draft_model"])
def test_answers_of_a_spread_model_are_those_of_one_device(words, gpus, as_on_gpus, plain, method):
    draft = place(build("llama", words), "cuda:0") if method == "draft_model" else None
    backend = engine(spread_over(build("llama", words), 2), words, method, draft, graphs="off")
    backend.warm_up(9)
    assert answers(backend, words) == plain
    about = backend.about()
    assert (about["attention"], about["captured_steps"], about["compiled"]) == ("flex", 0, False)
    assert not [note for note in backend.notes if note.startswith(("graphs", "compile", "attention"))]


@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_steps_of_all_models_are_captured_ahead(words, plain, method, monkeypatch):
    asked, capture = [], PagedSteps.capture

    def recorded(steps, rows, drafts):
        asked.append((rows, drafts, capture(steps, rows, drafts)))
        return asked[-1][-1]

    monkeypatch.setattr(PagedSteps, "capture", recorded)
    draft = build("llama", words) if method == "draft_model" else None
    backend = engine(build("llama", words), words, method, draft, attention="flex", graphs="emulate")
    backend.warm_up(2)
    assert asked == []
    backend.warm_up(9)
    assert [(rows, drafts) for rows, drafts, _ in asked] == [(3, method != "none")] * (1 + (draft is not None))
    assert min(count for _, _, count in asked) > 5
    assert any(f"graphs: {sum(count for _, _, count in asked)} steps captured" in note for note in backend.notes)
    assert answers(backend, words) == plain


@pytest.mark.parametrize("graphs", ["auto", "on"])
def test_a_note_says_that_there_are_no_graphs(words, gpus, as_on_gpus, plain, graphs):
    backend = engine(spread_over(build("llama", words), 2), words, graphs=graphs)
    backend.warm_up(9)
    assert answers(backend, words) == plain
    assert [note for note in backend.notes if "graphs" in note] == [GRAPHS]
    assert not [note for note in backend.notes if note.startswith("compile")]


def test_a_note_says_that_layers_are_not_compiled(words, gpus, as_on_gpus):
    backend = engine(spread_over(build("llama", words), 2), words, compile="on")
    backend.warm_up(9)
    wanted = "compile: the model's layers run uncompiled: it is spread over 2 GPUs"
    assert [note for note in backend.notes if note.startswith("compile")] == [wanted]


def test_blocks_are_as_many_as_the_fullest_device_has_room_for(words, gpus, as_on_gpus, monkeypatch):
    free = {FIRST: 4 << 20, SECOND: 16 << 20}
    monkeypatch.setattr(backend_module, "budget_of", lambda device, kept=0, share=0.5: int(free[device] + kept * share))
    backend = engine(spread_over(build("llama-heads-of-16", words), 2), words)
    (cache,) = backend._paged  # noqa: SLF001
    layers = 2 * 2 * 2 * 128 * 16 * 4  # of a block on each device: keys and values of 2 layers, 2 heads
    assert cache.blocks == (4 << 20) // layers
    free[SECOND] = 1 << 20  # what it holds counts as free
    room = backend._room()  # noqa: SLF001
    assert room.slots(1) == 128 * min(cache.blocks - 1, ((1 << 20) + int(layers * cache.blocks * 0.8)) // layers)


def test_stored_prefixes_of_a_spread_model_are_loaded(words, gpus, as_on_gpus, tmp_path):
    prompt = [(7 * at + 3) % 290 for at in range(600)]
    requests = [Request(i, f"r{i}", [*prompt, 5 + i], Sampling(max_new_tokens=5)) for i in range(3)]
    found = []
    for _ in range(2):
        store = PrefixStore(tmp_path / "store", 10**9)
        inner = spread_over(build("llama", words), 2)
        inner.config.max_position_embeddings = 1024
        backend = engine(inner, words, rows=2, prefixes=store)
        found.append([outcome.token_ids for outcome in backend.generate(requests)])
        stored = backend.about()["prefix_store"]
    assert found[0] == found[1]
    assert stored["loaded_tokens"] > 0


# -- what it does not run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"attention": "sdpa"}, {"attention": "cpu", "graphs": "off"}])
def test_torchs_own_attention_is_left_to_transformers(words, gpus, as_on_gpus, settings):
    inner = spread_over(build("llama", words), 2)
    if settings["attention"] == "cpu":  # which has no effect on a GPU
        assert loaded.prepare(inner, [], **settings).steps is not None
        return
    with pytest.raises(loaded.Refused, match="it is spread over 2 GPUs, which only attention: flex can compute"):
        loaded.prepare(inner, [], **settings)


def test_a_model_that_flex_attention_does_not_fit_is_left_to_transformers(words, gpus, monkeypatch):
    def refuse(*args):
        raise loaded.Unsupported("needs FlexAttention")

    monkeypatch.setattr(loaded, "flex", refuse)
    inner = spread_over(build("llama", words), 2)
    implementation = inner.config._attn_implementation
    with pytest.raises(loaded.Refused, match=r"it is spread over 2 GPUs, .* it needs FlexAttention"):
        loaded.prepare(inner, [])
    assert inner.config._attn_implementation == implementation
    assert not inner.lm_head._forward_pre_hooks  # noqa: SLF001


def test_a_model_that_is_offloaded_is_left_to_transformers(words):
    inner = build("llama", words)
    inner.model.layers[1].to("meta")
    assert [device.type for device in devices_of(inner)] == ["cpu", "meta"]
    for prefixes in (None, object()):
        with pytest.raises(loaded.Refused, match="weights are brought there for each forward"):
            engine(inner, words, prefixes=prefixes)


def test_several_gpus_are_no_reason_for_stock_generate():
    assert only_stock(Args(num_gpus=2), SpeculationConfig()) == ""


@pytest.mark.parametrize(("given", "expected"), [(None, None), (0, 0), (1, 1), (3, 1)])
def test_a_draft_model_is_on_one_gpu(monkeypatch, given, expected):
    monkeypatch.setattr(checkpoint, "load", lambda source, args, *rest: args.num_gpus)
    assert checkpoint.load_draft(SimpleNamespace(source=None), SpeculationConfig(), Args(num_gpus=given)) == expected
