"""Models whose weights a library quantises: they are computed as the library does, and never repacked."""

import importlib.util
import sys

import pytest
import torch

from ragspec import Pipeline, load_config
from ragspec.engine.model.weight_layouts import is_plain, stored_bytes
from ragspec.errors import ModelError
from tests.conftest import SAMPLE, read_jsonl

INT8 = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}
INT8["quant_type"]["default"]["_version"] = 2
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def answers(model, method, model_args=None, **args):
    config = {
        "model": model,
        "runner": "huggingface",
        "runner_args": {"batch_size": 4, "model_args": model_args or {}, **args},
        "prompt": {"max_prompt_tokens": 200},
        "sampling": {"max_new_tokens": 16},
        "speculation": {"method": method},
    }
    with Pipeline(load_config(config)) as pipeline:
        return [line["output"] for line in pipeline.answers(read_jsonl(SAMPLE)[:4])]


@pytest.fixture(scope="module")
def quantised(tiny, tmp_path_factory):
    """The tiny model as a checkpoint of int8 weights."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

    folder = tmp_path_factory.mktemp("quantised")
    how = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    AutoModelForCausalLM.from_pretrained(tiny, quantization_config=how).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return str(folder)


@needs_torchao
def test_a_quantised_checkpoint_answers_as_transformers_does(quantised):
    stock = answers(quantised, "none", engine="transformers")
    assert answers(quantised, "none", engine="ragspec") == stock
    assert answers(quantised, "context", engine="ragspec") == stock


@needs_torchao
def test_weights_that_are_quantised_as_they_load_give_the_same(quantised, tiny):
    given = {"quantization_config": INT8}
    assert answers(tiny, "context", given, engine="ragspec") == answers(quantised, "none", engine="transformers")


@needs_torchao
def test_quantised_weights_are_left_and_counted_as_they_are(quantised):
    from ragspec.models.loading import load_model
    from ragspec.models.resolve import resolve

    model = load_model(resolve(quantised), device="cpu", dtype="auto")
    layer = model.model.layers[0].mlp.up_proj
    assert type(layer) is torch.nn.Linear
    assert not is_plain(layer)
    assert is_plain(torch.nn.Linear(2, 2))
    numbers = layer.in_features * layer.out_features
    assert numbers <= stored_bytes(layer.weight) <= numbers + 8 * layer.out_features
    assert stored_bytes(torch.zeros(3, 2)) == 24


def test_a_library_that_is_missing_is_named(tiny, monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "bitsandbytes":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match=r"needs a package that is not installed: .*bitsandbytes.*; install it"):
        answers(tiny, "none", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
