"""Drafts taught by a target's answers: real training of tiny models, resumed, measured, refused."""

import json
from pathlib import Path

import pytest
import torch

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.training.examples import LEAST, Example
from ragspec.training.student import Student, cut_student, distill, spread_layers
from ragspec.training.train import Trained, train_draft
from tests.conftest import save_llama, train_tokenizer, write_jsonl


@pytest.fixture
def target(tmp_path, sample_texts):
    from transformers import AutoModelForCausalLM

    folder = save_llama(tmp_path / "target", train_tokenizer(400, sample_texts), layers=4)
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def examples(target, count=16):
    """Return what the target says after some prompts."""
    found = []
    for i in range(count):
        prompt = [5 + (31 * i + 7 * j) % 390 for j in range(8)]  # no padding among them
        out = target.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        found.append(Example(f"r{i}", out[0].tolist(), len(prompt)))
    return found


@pytest.mark.parametrize(("layers", "count", "kept"), [(30, 3, [0, 14, 29]), (4, 1, [0]), (4, 2, [0, 3])])
def test_layers_are_spread_over_the_target(layers, count, kept):
    assert spread_layers(layers, count) == kept


def test_a_draft_begins_as_its_targets_own_layers(target):
    _, model = target
    student = cut_student(model, 2)
    assert student.config.num_hidden_layers == 2
    own, theirs = student.state_dict(), model.state_dict()
    assert torch.equal(own["model.embed_tokens.weight"], theirs["model.embed_tokens.weight"])
    assert torch.equal(own["model.layers.1.mlp.up_proj.weight"], theirs["model.layers.3.mlp.up_proj.weight"])
    with pytest.raises(ConfigError, match="between 1 and 3"):
        cut_student(model, 4)


def test_a_draft_learns_what_it_is_taught(target, tmp_path):
    _, model = target
    taught = examples(model)
    student = Student(cut_student(model, 1))
    before = student.agreement(taught)
    steps = []
    assert distill(student, taught, 60, tmp_path, lambda *step: steps.append(step)) == 120
    assert steps[-1][0] == steps[-1][1] == 120
    assert steps[-1][2] < 0.5 * steps[0][2]
    assert student.agreement(taught) > before + 0.4


def test_agreement_is_that_of_one_token_at_a_time(target):
    _, model = target
    taught = examples(model, 3)
    student = Student(cut_student(model, 2))
    right = total = 0
    for example in taught:
        for at in range(example.prompt_tokens, len(example.token_ids)):
            guess = student.model(input_ids=torch.tensor([example.token_ids[:at]])).logits[0, -1].argmax()
            right, total = right + int(guess == example.token_ids[at]), total + 1
    assert student.agreement(taught) == pytest.approx(right / total)
    assert Student(model).agreement(taught) == 1.0


def test_interrupted_learning_goes_on_where_it_was(target, tmp_path, monkeypatch):
    _, model = target
    taught = examples(model)

    class Stop(Exception):
        pass

    def stop_at_five(done, steps, loss):
        if done == 5:
            raise Stop

    whole = Student(cut_student(model, 1))
    (tmp_path / "whole").mkdir()
    distill(whole, taught, 4, tmp_path / "whole", lambda *step: None)

    from ragspec.training import student as distil

    (tmp_path / "parts").mkdir()
    first = Student(cut_student(model, 1))
    monkeypatch.setattr(distil, "KEEP_EVERY_S", 0.0)
    monkeypatch.setattr(distil, "KEEPING", 0)
    with pytest.raises(Stop):
        distill(first, taught, 4, tmp_path / "parts", stop_at_five)
    second = Student(cut_student(model, 1))
    assert distill(second, taught, 4, tmp_path / "parts", lambda *step: None) == 8 - 4
    for name, value in whole.model.state_dict().items():
        assert torch.allclose(value, second.model.state_dict()[name], atol=1e-6), name
    with pytest.raises(ConfigError, match="other records"):
        distill(second, taught[1:], 4, tmp_path / "parts", lambda *step: None)


def config_of(folder, path, **more):
    raw = {"model": folder, "runner": "huggingface", "input": path, "sampling": {"max_new_tokens": 8}}
    return build_config({**raw, "runner_args": {"compile": "off"}, **more})


@pytest.mark.wide
def test_train_draft_writes_a_draft_that_runs_and_says_whether_it_pays(target, tmp_path, sample_texts):
    from rich.console import Console

    folder, _ = target
    words = " ".join(sample_texts).split()
    records = [{"id": f"q{i}", "query": " ".join(words[5 * i : 5 * i + 9])} for i in range(LEAST + 8)]
    config = config_of(folder, write_jsonl(tmp_path / "in.jsonl", records))
    console = Console(quiet=True)
    trained = train_draft(config, tmp_path / "out", layers=1, epochs=2, limit=None, console=console)
    assert LEAST - 4 <= trained.examples <= LEAST + 4  # an answer of one token teaches nothing
    assert 0 <= trained.before <= 1
    assert 0 < trained.after <= 1
    assert trained.ratio is not None
    found = json.loads((tmp_path / "out" / "draft.json").read_text())
    assert found["verdict"] == trained.verdict()
    results = json.loads((tmp_path / "out" / "check" / "results.json").read_text())
    assert {run["identical"] for run in results["runs"]} == {4}
    answers = tmp_path / "out" / "answers.jsonl"
    written = answers.stat().st_mtime_ns
    again = train_draft(config, tmp_path / "out", layers=1, epochs=2, limit=None, console=console)
    assert answers.stat().st_mtime_ns == written
    assert again.after == pytest.approx(trained.after)


@pytest.mark.parametrize("method", ["eagle3", "draft_model", "prompt_lookup"])
def test_a_config_that_has_a_draft_already_is_taught_from_without_it(target, tmp_path, method):
    from ragspec.training.examples import without_draft

    runner = "vllm" if method == "eagle3" else "huggingface"
    draft = {} if method == "prompt_lookup" else {"draft_model": target[0]}
    raw = {"model": target[0], "runner": runner, "speculation": {"method": method, **draft}}
    spec = without_draft(build_config(raw)).speculation
    assert (spec.method, spec.draft_model) == ("none" if draft else method, None)


def test_too_few_records_are_refused(target, tmp_path):
    from rich.console import Console

    folder, _ = target
    path = write_jsonl(tmp_path / "in.jsonl", [{"query": f"what is {i}?"} for i in range(5)])
    with pytest.raises(ConfigError, match=r"5 records are too few to teach a draft; at least 24"):
        train_draft(
            config_of(folder, path), tmp_path / "out", layers=1, epochs=1, limit=None, console=Console(quiet=True)
        )
    assert not (tmp_path / "out").exists()  # it is known before anything is answered


def test_what_the_users_files_look_like_does_not_matter(target, tmp_path, sample_texts):
    """Fields of other names, answers in Parquet, a generation config that transformers reads and does not write."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from rich.console import Console

    folder, _ = target
    settings = Path(folder) / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "temperature": 0.7, "top_p": 0.9}))
    words = " ".join(sample_texts).split()
    questions = [" ".join(words[5 * i : 5 * i + 9]) for i in range(LEAST + 8)]
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"key": [f"q{i}" for i in range(len(questions))], "question": questions}), path)
    config = config_of(
        folder,
        {"path": str(path), "columns": {"id": "key", "query": "question"}},
        output={"path": str(tmp_path / "answers.parquet")},
    )
    trained = train_draft(config, tmp_path / "out", layers=1, epochs=1, limit=None, console=Console(quiet=True))
    assert trained.ratio is not None, trained.untimed
    assert trained.examples > 16


def test_a_draft_is_written_in_its_targets_dtype(target, tmp_path):
    from transformers import AutoModelForCausalLM

    _, model = target
    Student(cut_student(model, 1), dtype=torch.bfloat16).save(tmp_path / "draft")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype="auto").dtype == torch.bfloat16


def test_a_run_that_fails_costs_the_figures_and_not_the_draft(target, tmp_path, sample_texts, monkeypatch):
    from rich.console import Console

    from ragspec.errors import ModelError
    from ragspec.training import train

    folder, _ = target
    words = " ".join(sample_texts).split()
    records = [{"id": f"q{i}", "query": " ".join(words[5 * i : 5 * i + 9])} for i in range(LEAST + 8)]
    config = config_of(folder, write_jsonl(tmp_path / "in.jsonl", records))

    def fail(*args, **settings):
        raise ModelError("no room for two models")

    monkeypatch.setattr(train, "run_benchmark", fail)
    trained = train_draft(config, tmp_path / "out", layers=1, epochs=1, limit=None, console=Console(quiet=True))
    assert trained.verdict() == "not timed: no room for two models"
    assert (tmp_path / "out" / "draft" / "config.json").exists()
    with pytest.raises(ConfigError, match="was saved by a run with another draft"):
        train_draft(config, tmp_path / "out", layers=2, epochs=1, limit=None, console=Console(quiet=True))


@pytest.mark.parametrize(
    ("ratio", "pays", "said"),
    [
        ((0.93, 0.21, 9.92), None, "inconclusive: 0.93x (0.21 to 9.92) the speed without drafts"),
        ((1.3, 0.9, 1.9), None, "inconclusive"),
        ((1.3, None, None), None, "1.30x (one pass) the speed without drafts, which may be chance"),
        (
            (1.3, 1.1, 1.5),
            True,
            "it pays off on this machine: 1.30x (1.10 to 1.50) the speed without drafts, end to end",
        ),
        ((0.8, 0.7, 0.9), False, "it does not pay off on this machine: 0.80x (0.70 to 0.90) the speed without drafts"),
        ((None, None, None), None, "not timed: no run finished"),
    ],
)
def test_a_draft_pays_or_does_not_only_where_the_interval_says_so(ratio, pays, said):
    trained = Trained("draft_model", "d", 1, 1, 0.0, 0.5, 1.0, 0.5, *ratio)
    assert trained.pays is pays
    assert said in trained.verdict()
