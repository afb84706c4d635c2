"""Real vLLM (its CPU build will do) with heads of random weights: no draft of theirs may change an answer.

Each takes most of a minute: `make test-all` runs one, `make test-long` all others.
"""

import importlib.util
import json

import pytest
from rich.console import Console

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.runners.vllm.runner import Runner
from ragspec.training.train import train_draft
from tests.cli.test_cli import ragspec
from tests.conftest import read_jsonl, write_jsonl
from tests.runners import heads

pytestmark = pytest.mark.vllm
QUESTIONS = [
    "Why is the sky blue?",
    "Name three colours of autumn leaves.",
    "Count from one to ten in words.",
    "Who wrote a letter to the king?",
]
TOKENS = 3  # drafted a step
CONFIG = {
    "runner": "vllm",
    "sampling": {"max_new_tokens": 20, "logprobs": 0},  # logprobs: so that a line tells its tokens
    "runner_args": {"enforce_eager": True, "max_model_len": 256, "batch_size": 4, "kv_cache_memory_bytes": 128 << 20},
}


def answers(folder, model, **speculation):
    """Return the lines and the totals of a run in a process of its own."""
    folder.mkdir()
    done, output = start(folder, model, **speculation)
    assert done.returncode == 0, done.stderr
    return read_jsonl(output), json.loads((folder / "out.stats.json").read_text())


def start(folder, model, **speculation):
    config, output = folder / "config.yaml", folder / "out.jsonl"
    config.write_text(json.dumps(CONFIG | {"model": model, "speculation": speculation}))  # JSON is YAML
    source = write_jsonl(folder / "in.jsonl", [{"id": str(i), "query": text} for i, text in enumerate(QUESTIONS)])
    return ragspec("generate", "-c", config, "-i", source, "-o", output), output


def tokens(lines):
    return {line["id"]: [token["bytes"] for token in line["logprobs"]] for line in lines}


def assert_counts_add_up(lines, totals):
    for line in lines:
        spec = line["speculation"]
        assert 0 <= spec["accepted"] <= spec["drafted"] <= TOKENS * spec["steps"]
        # the last step may write beyond the answer's end
        assert 0 <= spec["steps"] + spec["accepted"] - line["output_tokens"] <= 1
    for key in ("steps", "drafted", "accepted"):
        assert totals["speculation"][key] == sum(line["speculation"][key] for line in lines)


def assert_drafts_changed_nothing(lines, totals, plain):
    assert tokens(lines) == tokens(plain)
    assert_counts_add_up(lines, totals)
    spec = totals["speculation"]
    assert 0 <= spec["accepted"] < 0.2 * spec["drafted"]  # random weights know nothing


@pytest.fixture(scope="module")
def plain(demo, tmp_path_factory):
    """The demo model's answers without drafts."""
    lines, _ = answers(tmp_path_factory.mktemp("plain") / "run", demo, method="none")
    return lines


MAKE = {
    "eagle": heads.save_eagle,
    "eagle3": heads.save_eagle3,
    "medusa": heads.save_medusa,
    "dflash": heads.save_dflash,
}


@pytest.mark.wide
@pytest.mark.parametrize(
    "method", ["eagle3", *(pytest.param(name, marks=pytest.mark.long) for name in MAKE if name != "eagle3")]
)
def test_a_head_that_knows_nothing_changes_no_answer(demo, plain, tmp_path, method):
    head = MAKE[method](tmp_path / "head", demo)
    lines, totals = answers(tmp_path / "run", demo, method=method, draft_model=head, num_tokens=TOKENS)
    assert {line["speculation"]["method"] for line in lines} == {method}
    assert_drafts_changed_nothing(lines, totals, plain)


@pytest.mark.timeout(1800)  # it trains for as long as a machine takes
@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="speculators is not installed")
@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_a_head_that_was_taught_here_knows_in_vllm_what_it_learnt(demo, tmp_path, method, monkeypatch):
    """Four questions, six times each, so that what is held out was taught too."""
    monkeypatch.setattr("ragspec.training.heads.VOCABULARY", 4096)  # more words take most of the time
    records = [{"id": f"{i}", "query": QUESTIONS[i % len(QUESTIONS)]} for i in range(24)]
    raw = CONFIG | {"model": demo, "input": str(write_jsonl(tmp_path / "in.jsonl", records))}
    trained = train_draft(
        build_config(raw), tmp_path / "out", method=method, epochs=30, limit=None, console=Console(quiet=True)
    )
    assert trained.untimed == ""
    assert trained.after > 0.8 > trained.before
    assert trained.acceptance > 0.3, "it reads other layers in vLLM than those it was taught with"
    results = json.loads((tmp_path / "out" / "check" / "results.json").read_text())
    assert {run["identical"] for run in results["runs"] if run["name"] == method} == {4}


@pytest.mark.long
def test_a_models_own_mtp_layer_that_knows_nothing_changes_no_answer(demo, tmp_path):
    model = heads.save_mimo(tmp_path / "model", demo)
    plain, _ = answers(tmp_path / "plain", model, method="none")
    lines, totals = answers(tmp_path / "run", model, method="mtp", num_tokens=1)
    assert_drafts_changed_nothing(lines, totals, plain)


def save_mlp_speculator(folder, target):
    """A config is enough: vLLM 0.32 has no such model."""
    sizes = {"vocab_size": 49152, "emb_dim": 576, "inner_dim": 64, "n_predict": TOKENS, "n_candidates": 5}
    model = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]}
    return heads.save(folder, model | sizes | {"top_k_tokens_per_head": [5, 3, 2]}, {})


@pytest.mark.parametrize(
    ("method", "make", "message"),
    [
        ("dspark", heads.save_dflash, "speculation.method: dspark needs a GPU"),
        ("mlp_speculator", save_mlp_speculator, "vLLM rejects the configuration"),
    ],
)
def test_a_head_that_the_cpu_build_cannot_run_is_refused_before_any_weights_load(demo, tmp_path, method, make, message):
    raw = {"method": method, "model": make(tmp_path / "head", demo), "num_speculative_tokens": TOKENS}
    speculation = {"method": "speculative_config", "speculative_config": raw}
    with pytest.raises(ConfigError) as caught:
        Runner(build_config(CONFIG | {"model": demo, "speculation": speculation})).check()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_a_head_that_does_not_fit_ends_the_run_in_one_line_that_names_the_method(demo, tmp_path):
    model = heads.save_mimo(tmp_path / "model", demo)
    head = heads.save_eagle3(tmp_path / "head", demo)
    done, _ = start(tmp_path, model, method="eagle3", draft_model=head, num_tokens=TOKENS)
    assert done.returncode == 3
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "method eagle3" in error
    assert "Traceback" not in done.stderr
