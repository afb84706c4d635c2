"""Linear layers of one input, computed as one product: the same model, compiled or not, and undone without a trace."""

import pytest
import torch

from ragspec.engine.backends.graphs import emulated
from ragspec.engine.backends.paged_attention import gathered
from ragspec.engine.model.compiled import CompiledLayers, called_with
from ragspec.engine.model.forward import Model
from ragspec.engine.model.merged_linears import MergedLinear, MergedLinears
from ragspec.engine.model.self_check import differs
from tests.engine.test_engine_models import FAMILIES, build

TOLERANCE = 1e-4
MERGED = {"gpt2": 0, "gpt_neox": 0, "phi3": 0, "opt": 6}  # those that have one layer for several, or other layers


def logits(inner):
    with torch.no_grad():
        return inner(torch.tensor([[5, 6, 7, 8, 9, 3]])).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_computes_the_same(words, family):
    inner = build(family, words)
    before, layers = logits(inner), inner.config.num_hidden_layers
    names, size = list(inner.state_dict()), sum(each.nbytes for each in inner.parameters())
    merged = MergedLinears(inner)
    assert len(merged) == MERGED.get(family, 5 * layers)
    assert torch.allclose(logits(inner), before, atol=TOLERANCE)
    assert sum(each.nbytes for each in inner.parameters()) == size
    model = Model(inner, 2, None, gathered, emulated)
    assert differs(model, TOLERANCE) == ""
    model.release()
    merged.undo()
    assert list(inner.state_dict()) == names
    assert torch.equal(logits(inner), before)
    assert not any(isinstance(module, MergedLinear) for module in inner.modules())


def test_merged_layers_are_captured_for_the_compiler(words):
    inner = build("llama-bias", words)
    MergedLinears(inner)
    model = Model(inner, 2, None, gathered, emulated)
    products = []

    def counted(graph):
        products.append(sum("mm" in str(node.target) for node in graph.module.graph.nodes))
        return called_with(graph.module)

    layers = CompiledLayers(model, counted)
    layers.on()
    assert differs(model, TOLERANCE) == ""
    assert products == [4]  # of queries, keys and values; of the output; of gate and up; of down


def test_a_layer_that_reads_something_else_in_between_computes_anew(words):
    inner = build("llama", words)
    MergedLinears(inner)
    attention = inner.model.layers[0].self_attn
    one, other = torch.randn(3, 32), torch.randn(3, 32)
    expected = attention.k_proj(other)
    attention.q_proj(one)
    assert torch.allclose(attention.k_proj(other), expected)
    assert attention.q_proj.weight.shape == (32, 32)
