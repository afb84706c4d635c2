"""Packed linear layers: what they compute, and the way back."""

import copy
import shutil
import weakref

import pytest
import torch
import transformers

from ragspec.engine.model import loaded as prepared
from ragspec.engine.model import weight_layouts as forms
from ragspec.engine.model import weight_layouts as linear
from ragspec.engine.model.weight_layouts import (
    POINTS,
    OneDnnLayout,
    PackedLinear,
    best,
    makers,
    measure,
    pack_linears,
    unpack_linears,
)
from ragspec.engine.native.kernels import build
from ragspec.host.compiler import Unbuilt


def kernels():
    try:
        return build(64)
    except Unbuilt:
        return None


FORMS = makers(kernels())
KINDS = {"torch": forms.TorchLayout, "onednn": OneDnnLayout, "native": forms.NativeLayout}
pytestmark = pytest.mark.skipif(len(FORMS) < 2, reason="this machine has one form of linear layers only")


def packed(plain, form):
    return PackedLinear(plain, {form: FORMS[form](plain.weight.detach())}, (form,))


def shape(layer):
    return layer.out_features, layer.in_features


def llama(**settings):
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **settings,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [0, 1, 5, 13, 64, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(40, 24), (600, 70), (33, 129)])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_every_form_computes_what_the_plain_one_does(tokens, form, inputs, outputs, bias):
    torch.manual_seed(0)
    plain = torch.nn.Linear(inputs, outputs, bias=bias)
    layer = packed(plain, form)
    x = torch.randn(1, tokens, inputs)
    assert torch.allclose(layer(x), plain(x), atol=1e-5)
    assert torch.allclose(layer(x[:, ::2]), plain(x[:, ::2]), atol=1e-5)
    assert torch.equal(layer.unpacked().weight, plain.weight)


@pytest.mark.skipif("native" not in FORMS, reason="no C++ compiler")
@pytest.mark.parametrize("x", [torch.ones(1, 3, 40, dtype=torch.float64), torch.ones(1, 3, 41)])
def test_the_kernel_refuses_what_it_would_misread(x):
    layer = packed(torch.nn.Linear(40, 24), "native")
    with pytest.raises(RuntimeError, match="where the kernel takes float32 of 40"):
        layer(x)


def test_the_fastest_form_is_chosen_for_each_number_of_tokens():
    seconds = {"torch": [5, 5, 5, 1, 1], "native": [1, 1, 1, 5, 10]}
    choice = best(seconds, several=True)
    assert (choice[1], choice[16], choice[31], choice[33], choice[-1]) == (
        *("native", "native", "native"),
        *("torch", "torch"),
    )
    assert best(seconds, several=False) == ("torch",), "17 times the best, the other 18"
    seconds = {"torch": [5, 5, 5, 1, float("inf")], "native": [1, 1, 1, 5, float("inf")]}
    assert best(seconds, several=False) == ("native",)
    assert best(seconds, several=True)[-1] == "torch", "nothing was timed with so many: as with the most that were"


def test_what_was_measured_is_kept_for_the_processes_that_follow(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(forms, "UNDISTURBED", 0.0)  # this machine may be as busy as it likes
    weights = [torch.randn(32, 16), torch.randn(40, 9000)]
    first = forms.measured(weights, kernels())
    monkeypatch.setattr(forms, "measure", lambda *given: pytest.fail("it is known"))
    assert forms.measured(weights, kernels()) == first
    monkeypatch.setattr(forms, "measure", lambda *given: {(1, 1): {"torch": [1.0]}})
    assert forms.measured(weights[:1], kernels()) == {(1, 1): {"torch": [1.0]}}
    (tmp_path / "no").write_text("a file")
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path / "no"))
    assert forms.measured(weights, kernels()) == {(1, 1): {"torch": [1.0]}}


def test_on_a_busy_machine_forms_are_timed_with_one_thread_and_the_result_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(forms, "LEAST_S", 0.0)
    monkeypatch.setattr(forms.time, "process_time", lambda: 0.0)  # others have all of the processor
    threads, seen = torch.get_num_threads(), []
    timed = forms.timings
    monkeypatch.setattr(forms, "timings", lambda *given: seen.append(torch.get_num_threads()) or timed(*given))
    layers = [torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(64, 128, bias=False)]
    choices = linear.chosen_forms(layers, kernels())
    assert {name for choice in choices.values() for name in choice} <= set(FORMS)
    assert set(choices) == {(32, 16), (128, 64)}
    assert seen[-1] == 1
    assert torch.get_num_threads() == threads
    assert not list(tmp_path.rglob("*.json"))
    monkeypatch.undo()
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(forms, "UNDISTURBED", 0.0)
    linear.chosen_forms(layers, kernels())
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_a_moment_that_slows_the_machine_down_decides_nothing(monkeypatch):
    """Each form is timed in turn with the others, and the median counts."""
    calls = dict.fromkeys(FORMS, 0)

    def timed(made, tokens):
        name = next(name for name, kind in KINDS.items() if isinstance(made[0][1], kind))
        calls[name] += 1
        slow = 40 if calls[name] % forms.REPEATS in (1, 2) else 1  # two of five times
        yield (32, 16), slow * (1.0 if name == "torch" else 2.0)

    monkeypatch.setattr(forms, "timings", timed)
    seconds = measure([torch.randn(32, 16)], FORMS, patient=True)[32, 16]
    assert {name: set(each) for name, each in seconds.items()} == {
        name: {1.0 if name == "torch" else 2.0} for name in FORMS
    }


def test_a_weight_too_large_to_try_has_the_form_of_the_largest_that_was(monkeypatch):
    layers = [torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(64, 128, bias=False)]
    monkeypatch.setattr(forms, "STREAMED", layers[0].weight.nbytes)
    choices = linear.chosen_forms(layers, kernels())
    assert choices[128, 64] == choices[32, 16]
    monkeypatch.setattr(forms, "STREAMED", 0)
    assert linear.chosen_forms(layers, kernels())[128, 64] == ("torch",)


def test_forms_are_timed_for_every_shape_and_size():
    weights = [torch.randn(32, 16), torch.randn(48, 16), torch.randn(32, 16)]
    seconds = measure(weights, FORMS, patient=True)
    assert set(seconds) == {(32, 16), (48, 16)}
    for found in seconds.values():
        assert set(found) == set(FORMS)
        assert all(len(each) == len(POINTS) and min(each) > 0 and max(each) < 1 for each in found.values())


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_unpacking_gives_the_model_back(several, tied, ours, monkeypatch):
    monkeypatch.setattr(linear, "free_bytes", lambda: 1 << 40 if several else 0)
    model = llama(tie_word_embeddings=tied, attention_bias=True)
    before = copy.deepcopy(model.state_dict())
    assert pack_linears(model, kernels() if ours else None) == []
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    unpack_linears(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied


def test_what_memory_was_too_short_to_try_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(forms, "UNDISTURBED", 0.0)
    weights = [torch.randn(32, 16), torch.randn(64, 128)]
    monkeypatch.setattr(forms, "free_bytes", lambda: 2 * len(FORMS) * weights[0].nbytes)
    assert set(forms.measured(weights, kernels())) == {(32, 16)}
    assert not list(tmp_path.rglob("*.json"))
    monkeypatch.setattr(forms, "free_bytes", lambda: 1 << 40)
    assert set(forms.measured(weights, kernels())) == {(32, 16), (64, 128)}
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_a_weight_is_freed_as_soon_as_it_is_packed(monkeypatch):
    """Or a model would need twice its memory to begin with."""
    monkeypatch.setattr(
        linear, "chosen_forms", lambda linears, kernels: dict.fromkeys(map(shape, linears), ("onednn",))
    )
    model = llama()
    weights = [weakref.ref(layer.weight) for layer in model.modules() if type(layer) is torch.nn.Linear]
    compared, held = linear.packed_differs, []

    def counted(*given):
        held.append(sum(weight() is not None for weight in weights))
        return compared(*given)

    monkeypatch.setattr(linear, "packed_differs", counted)
    assert pack_linears(model) == []
    assert held == list(range(len(weights), 0, -1))


def test_layers_of_size_0_are_left_as_they_are():
    """Some models without shared experts have them."""
    config = transformers.Qwen2MoeConfig(
        **{"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 0},
    )
    model = prepared.prepare(transformers.AutoModelForCausalLM.from_config(config).eval()).inner
    kinds = [type(layer) for name, layer in model.named_modules() if "shared_expert." in name and "proj" in name]
    assert kinds == [torch.nn.Linear] * 6


def test_a_layer_that_computes_something_else_when_packed_is_left_as_it_was_and_named(monkeypatch):
    right = OneDnnLayout.__call__

    def wrong(self, x, bias):
        out = right(self, x, bias)
        return out * 1.001 if out.shape[-1] == 48 and x.shape[-2] > 8 else out

    monkeypatch.setattr(OneDnnLayout, "__call__", wrong)
    monkeypatch.setattr(
        linear, "chosen_forms", lambda linears, kernels: dict.fromkeys(map(shape, linears), ("onednn",))
    )
    notes = []
    model = prepared.prepare(llama(), notes)
    kinds = {name: type(module) for name, module in model.inner.named_modules() if name.endswith("_proj")}
    assert {name for name, kind in kinds.items() if kind is torch.nn.Linear} == {
        f"model.layers.{n}.mlp.{which}_proj" for n in range(2) for which in ("gate", "up")
    }
    assert any("4 linear layers are not packed" in note for note in notes)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("tokens", [1, 13, 144, 145, 229, 700])  # few, and many in one chunk and in several
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (577, 33), (1300, 96), (64, 5)])  # in one depth and several
def test_our_kernels_compute_the_same_for_any_number_of_tokens(tokens, inputs, outputs):
    kernels = build(32)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(tokens, inputs)
    packed = kernels.pack(weight)
    assert packed.dtype == torch.float32
    for added in (None, bias):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
        found = kernels.linear(x, packed, outputs, added).double()
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 13, 60, 144, 145, 229])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (577, 33), (1300, 96), (64, 5)])
def test_a_weight_of_16_bits_is_kept_in_them_with_the_same_results(dtype, tokens, inputs, outputs):
    kernels = build(32)
    weight, bias = torch.randn(outputs, inputs).to(dtype).float(), torch.randn(outputs)
    weight[0, :4] = torch.tensor([0.0, -0.0, 6e-8, -1e-5]).to(dtype).float()  # in float16 not normal
    packed = kernels.pack(weight)
    assert packed.dtype == dtype
    assert torch.equal(kernels.unpack(packed, outputs).view(torch.int32), weight.view(torch.int32))
    x = torch.randn(tokens, inputs)
    for added in (None, bias):
        assert torch.equal(kernels.linear(x, packed, outputs, added), kernels.linear(x, packed.float(), outputs, added))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_one_number_of_more_bits_keeps_a_weight_as_it_is():
    kernels = build(32)
    weight = torch.ones(5000, 3)
    assert kernels.kept_as(weight) == torch.bfloat16
    for number, dtype in ((1 + 2.0**-10, torch.float16), (1 + 2.0**-20, torch.float32)):
        weight[-1, -1] = number
        assert kernels.kept_as(weight) == dtype
