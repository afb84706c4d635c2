"""EAGLE-3 and DFlash heads: the models of `speculators`, taught for real on a tiny target."""

import importlib.util
import json

import pytest
import torch
from rich.console import Console

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.runners.huggingface.args import Args
from ragspec.runners.huggingface.checkpoint import Checkpoint
from ragspec.training import heads
from ragspec.training.examples import Example
from ragspec.training.heads import Head, read_layers
from ragspec.training.student import distill
from ragspec.training.train import train_draft
from tests.conftest import save_llama, train_tokenizer, wide

installed = pytest.mark.skipif(
    importlib.util.find_spec("speculators") is None, reason="speculators is not installed (make setup-vllm)"
)


@pytest.fixture
def checkpoint(tmp_path, sample_texts):
    folder = save_llama(tmp_path / "target", train_tokenizer(400, sample_texts), layers=4)
    return Checkpoint(str(folder), Args(device="cpu", dtype="float32"))


def taught(target, count=8):
    found = []
    for i in range(count):
        prompt = [5 + (31 * i + 7 * j) % 390 for j in range(8)]
        out = target.generate(torch.tensor([prompt]), max_new_tokens=14, do_sample=False, eos_token_id=None)
        found.append(Example(f"r{i}", out[0].tolist(), len(prompt)))
    return found


@pytest.mark.parametrize(("count", "read"), [(30, [2, 15, 27]), (7, [2, 3, 4]), (6, [3, 4, 5]), (3, [0, 1, 2])])
def test_three_layers_are_read(count, read):
    assert read_layers(count) == read


@installed
@pytest.mark.parametrize("kind", [*wide("eagle3"), pytest.param("dflash", marks=pytest.mark.long)])
def test_a_head_learns_what_it_is_taught(kind, checkpoint, tmp_path):
    target = checkpoint.load()
    examples = taught(target)
    head = Head(kind, checkpoint, target, None, examples)
    before = head.agreement(examples)
    weights = {name: value.clone() for name, value in target.state_dict().items()}
    head.rate = 3e-3
    losses = []
    distill(head, examples, 150, tmp_path, lambda done, steps, loss: losses.append(loss))
    assert len(losses) == 150
    assert losses[-1] < 0.6 * losses[0]
    assert head.agreement(examples) > before + 0.3
    for name, value in target.state_dict().items():
        assert torch.equal(value, weights[name]), name  # it was only read
    head.save(tmp_path / "draft")
    assert not list((tmp_path / "draft").glob("*.py"))
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert "auto_map" not in config
    if kind == "dflash":  # all layers see the whole past, and all of a block
        assert set(config["transformer_layer_config"]["layer_types"]) == {"full_attention"}
        assert config["sliding_window_non_causal"] is True
    from speculators.model import SpeculatorModel

    loaded = SpeculatorModel.registry[kind].from_pretrained(tmp_path / "draft")
    for name, value in loaded.named_parameters():
        if value.requires_grad:
            assert torch.equal(value, dict(head.model.named_parameters())[name]), name


@installed
def test_what_a_head_reads_is_what_the_targets_layers_are_given(checkpoint):
    target = checkpoint.load()
    ids = [7, 30, 12, 99, 5, 250]
    head = Head("eagle3", checkpoint, target, None, taught(target, 2))
    states, last = head.read(ids)
    given = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, i=i: given.update({i: args[0][0]}))
        for i, layer in enumerate(target.model.layers)
    ]
    logits = target(input_ids=torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    assert torch.allclose(states, torch.cat([given[i] for i in read_layers(4)], -1), atol=1e-5)
    assert torch.allclose(target.lm_head(target.model.norm(last)), logits, atol=1e-4)


@installed
def test_a_target_whose_logits_speculators_does_not_compute_is_refused(checkpoint, monkeypatch):
    target = checkpoint.load()
    examples = taught(target, 2)
    with torch.no_grad():
        target.model.norm.weight.mul_(-1.5)  # as if its norm were another one than speculators'
    with pytest.raises(ConfigError, match="LlamaForCausalLM cannot have such a head: speculators computes"):
        Head("eagle3", checkpoint, target, None, examples)


@installed
def test_a_course_of_dflash_does_not_depend_on_where_it_was_interrupted(checkpoint, monkeypatch):
    """Where blocks begin is drawn, if an answer has more places than are taken at a time."""
    monkeypatch.setattr(heads, "ANCHORS", 4)
    target = checkpoint.load()
    examples = taught(target, 2)
    head = Head("dflash", checkpoint, target, 1, examples)
    losses = [float(head.forward(examples[0], turn)[0]) for turn in (0, 1, 0, 1)]
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]


@installed
def test_a_head_drafts_the_words_that_answers_use(checkpoint, monkeypatch):
    monkeypatch.setattr(heads, "VOCABULARY", 64)
    target = checkpoint.load()
    examples = taught(target, 3)
    head = Head("eagle3", checkpoint, target, 1, examples)
    said = {token for example in examples for token in example.token_ids[example.prompt_tokens :]}
    drafted = set((head.model.d2t + torch.arange(64)).tolist())
    assert len(said) <= 64
    assert said <= drafted
    assert 0 <= head.agreement(examples) <= 1


@installed
def test_a_course_of_another_draft_is_not_gone_on_with(checkpoint, tmp_path):
    target = checkpoint.load()
    examples = taught(target, 2)
    distill(Head("eagle3", checkpoint, target, 1, examples), examples, 1, tmp_path, lambda *step: None)
    with pytest.raises(ConfigError, match="was saved by a run with another draft"):
        distill(Head("eagle3", checkpoint, target, 2, examples), examples, 1, tmp_path, lambda *step: None)


def test_what_cannot_be_trained_is_refused_before_anything_is_answered(tmp_path, sample_texts, monkeypatch):
    folder = save_llama(tmp_path / "target", train_tokenizer(400, sample_texts), layers=2)
    config = build_config({"model": str(folder), "runner": "huggingface", "input": "in.jsonl"})

    def refusal(method, layers=None):
        with pytest.raises(ConfigError) as caught:
            train_draft(
                config,
                tmp_path / "out",
                method=method,
                layers=layers,
                epochs=1,
                limit=None,
                console=Console(quiet=True),
            )
        return str(caught.value)

    assert refusal("medusa") == '--method: "medusa" cannot be trained; choose one of draft_model, eagle3, dflash'
    assert refusal("draft_model", 2) == "--layers: must be between 1 and 1, fewer than the target has"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there is one")
    assert refusal("dflash") == "--method dflash: the target has 2 layers, and a head reads 3"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal("eagle3").startswith("--method eagle3: needs the speculators package (pip install")
    assert not (tmp_path / "out").exists()
