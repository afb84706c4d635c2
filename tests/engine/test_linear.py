"""Packed linear layers: what they compute, and the way back."""

import copy

import pytest
import torch
import transformers

from ragspec.engine import backend, linear
from ragspec.engine.linear import PackedLinear, can_pack, pack_linears, unpack_linears

pytestmark = pytest.mark.skipif(
    not can_pack(torch.nn.Linear(2, 2)), reason="this machine's torch has no packed linear layers"
)


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


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_what_the_plain_one_does(tokens, both, bias):
    plain = torch.nn.Linear(40, 24, bias=bias)
    x = torch.randn(1, tokens, 40)
    assert torch.allclose(PackedLinear(plain, both)(x), plain(x), atol=1e-5)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_unpacking_gives_the_model_back(both, tied, monkeypatch):
    monkeypatch.setattr(linear, "free_bytes", lambda: 1 << 40 if both else 0)
    model = llama(tie_word_embeddings=tied, attention_bias=True)
    before = copy.deepcopy(model.state_dict())
    assert pack_linears(model) == []
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    unpack_linears(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied


def test_a_layer_that_computes_something_else_when_packed_is_left_as_it_was_and_named(monkeypatch):
    right = PackedLinear.forward

    def wrong(self, x):
        out = right(self, x)
        return out * 1.001 if self.out_features == 48 and x.shape[-2] > 8 else out

    monkeypatch.setattr(PackedLinear, "forward", wrong)
    notes = []
    model = backend.prepare(llama(), notes)
    kinds = {name: type(module) for name, module in model.inner.named_modules() if name.endswith("_proj")}
    assert {name for name, kind in kinds.items() if kind is torch.nn.Linear} == {
        f"model.layers.{n}.mlp.{which}_proj" for n in range(2) for which in ("gate", "up")
    }
    assert any("4 linear layers are not packed" in note for note in notes)
