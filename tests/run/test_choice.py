"""runner: auto: what it weighs, and what it says."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ragspec.cli import app
from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.host.cache import cache_dir
from ragspec.run import runner_choice as choice
from ragspec.run import runner_choice as experience
from ragspec.run.generate import generate
from ragspec.run.runner_choice import (
    TOKEN_S,
    Speed,
    choose_for_input,
    choose_runner,
    expected_seconds,
    prior_token_s,
    remember,
    speeds,
)
from ragspec.runners.vllm.runner import Runner
from ragspec.stats import RunSummary
from tests.conftest import ROOT, SAMPLE


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A machine without a GPU, without experience, and with vLLM."""
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "has_gpu", lambda: False)
    monkeypatch.setattr(choice, "has_vllm", lambda: True)
    monkeypatch.setattr(Runner, "check", lambda self: None)


def config(**more):
    return build_config({"model": "demo", **more})


def summary(tokens, seconds, load=1.0):
    return RunSummary(prompt_tokens=tokens, generate_s=seconds, load_s=load)


def test_a_model_that_is_nowhere_is_told_before_anything_heavy_is_imported():
    script = (
        "import sys\nfrom ragspec.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    args = ["generate", "--model", "nobody/nowhere-7B", "-i", str(SAMPLE), "-o", "-"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script, *args], env=environment, capture_output=True, text=True)
    assert done.stdout == "2 []\n"
    assert 'error: model: "nobody/nowhere-7B": is not a local folder' in done.stderr


def test_a_named_runner_is_left_alone():
    assert choose_runner(config(runner="vllm"), 10) == choice.RunnerChoice(config(runner="vllm"))


def test_without_vllm_there_is_one_choice(monkeypatch):
    monkeypatch.setattr(choice, "has_vllm", lambda: False)
    chosen = choose_runner(config(), 10**9)
    assert chosen.config.runner == "huggingface"
    assert chosen.why == "runner: huggingface, as chosen by auto: vLLM is not installed"


@pytest.mark.parametrize(
    "more",
    [{"runner_args": {"compile": "off"}}, {"speculation": {"method": "early_exit", "early_exit_layer": 4}}],
)
def test_what_only_our_engine_has_is_answered_there(more, monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    assert choose_runner(config(**more), 10**9).config.runner == "huggingface"


def test_what_only_vllm_has_is_answered_there():
    chosen = choose_runner(config(speculation={"method": "suffix"}, runner_args={"max_model_len": 512}), 1)
    assert chosen.config.runner == "vllm"
    assert chosen.why.endswith("only this runner supports the config")


def test_the_size_of_the_input_decides(monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    assert choose_runner(config(), 10).config.runner == "huggingface"
    assert choose_runner(config(), None).config.runner == "huggingface"
    chosen = choose_runner(config(), 10**6)
    assert chosen.config.runner == "vllm"
    assert "s before huggingface, by default estimates: neither has run here yet" in chosen.why


def test_prompts_count_as_much_as_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"query": "?", "contexts": ["long " * 1_000_000]}) + "\n")
    assert choose_for_input(config(input=str(path))).config.runner == "vllm"
    path.write_text(json.dumps({"query": "?"}) + "\n")
    assert choose_for_input(config(input=str(path))).config.runner == "huggingface"
    assert choose_for_input(config(input=str(tmp_path / "none.jsonl"))).config.runner == "huggingface"


def test_what_vllm_refuses_is_answered_by_ours(monkeypatch):
    def refuse(self):
        raise ConfigError("it does not know this architecture")

    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setattr(Runner, "check", refuse)
    chosen = choose_runner(config(), 10**6)
    assert chosen.config.runner == "huggingface"
    assert chosen.why.endswith("vLLM is expected to be faster, but it does not know this architecture")


def test_experience_takes_the_place_of_the_priors():
    ours, other = config(runner="huggingface"), config(runner="vllm")
    assert choose_runner(config(), 10**6).config.runner == "huggingface"  # as fast, and sooner loaded
    remember(ours, summary(10_000, 40))
    remember(other, summary(10_000, 20, load=60))
    assert speeds(config()) == {
        "huggingface": Speed(1.0, 4e-3, 10_000, 1),
        "vllm": Speed(60.0, 2e-3, 10_000, 1),
    }
    assert choose_runner(config(), 100).config.runner == "huggingface"
    assert choose_runner(config(), 1000).config.runner == "vllm"
    assert choose_runner(config(), 1000).why.endswith("by earlier runs of huggingface and vllm")
    assert speeds(build_config({"model": "another"})) == {}


def test_a_run_that_was_slowed_down_does_not_count_for_long():
    ours = config(runner="huggingface")
    remember(ours, summary(10_000, 640, load=300))
    for _ in range(2):
        remember(ours, summary(10_000, 40, load=2))
    assert speeds(config()) == {"huggingface": Speed(2.0, 4e-3, 30_000, 3)}


@pytest.mark.parametrize(
    "other",
    [
        {"runner_args": {"enforce_eager": True}},
        {"runner_args": {"dtype": "bfloat16"}},
        {"runner_args": {"tensor_parallel_size": 2}},
        {"runner_args": {"quantization": "fp8"}},
        {"runner_args": {"compilation_config": {"level": 0}}},
        {"speculation": {"method": "eagle3", "draft_model": "a/head"}},
    ],
)
def test_what_loads_otherwise_says_nothing_of_this(other):
    remember(config(runner="vllm", **other), summary(10_000, 40, load=4))
    assert speeds(config(runner="vllm")) == {}
    remember(config(runner="vllm"), summary(10_000, 40, load=50))
    assert speeds(config())["vllm"].load_s == 50
    assert speeds(config(runner="vllm", **other))["vllm"].load_s == 4


def test_another_version_of_a_runner_is_measured_anew(monkeypatch):
    remember(config(runner="vllm"), summary(10_000, 40))
    monkeypatch.setattr(experience, "installed", lambda names: dict.fromkeys(names, "99"))
    assert speeds(config()) == {}


def test_a_load_time_that_was_wrong_once_is_put_right_by_the_next_runs():
    """However short they are, and whichever way it was wrong."""
    for wrong in (4, 400):
        for load in (wrong, 41, 55, 47):
            remember(config(runner="vllm"), summary(20, 0.5, load=load))
        assert 41 <= speeds(config())["vllm"].load_s <= 55
    for _ in range(experience.RECENT):
        remember(config(runner="vllm"), summary(20, 0.5, load=90))
    assert speeds(config())["vllm"].load_s == 90


def test_a_token_counts_once_whichever_run_it_was_in():
    ours = config(runner="huggingface")
    remember(ours, summary(10_000, 40))
    for _ in range(3):
        remember(ours, summary(20, 4))
    assert speeds(config())["huggingface"].token_s == 4e-3
    few = expected_seconds({"huggingface": Speed(5.0, 0.2, 20, 3)}, TOKEN_S["CPU"], 1000)
    assert few["huggingface"] < 15  # a few tokens do not outweigh the priors


def test_downloading_is_no_loading():
    ours = config(runner="vllm")
    remember(ours, summary(10_000, 40, load=900), downloaded=True)
    assert speeds(config()) == {"vllm": Speed(None, 4e-3, 10_000, 1)}
    assert expected_seconds(speeds(config()), TOKEN_S["CPU"], 0)["vllm"] == choice.LOADING_S["vllm"]


def test_a_run_that_loaded_nothing_teaches_nothing():
    remember(config(runner="vllm"), summary(0, 0, load=0))
    assert speeds(config()) == {}
    remember(config(runner="vllm"), summary(0, 0, load=30))
    assert speeds(config()) == {"vllm": Speed(30.0, None, 0, 1)}


def test_the_settings_of_a_model_that_are_kept_are_the_latest():
    for size in range(experience.SETTINGS + 1):
        remember(config(runner="vllm", runner_args={"batch_size": size + 1}), summary(10, 1))
    assert speeds(config(runner="vllm", runner_args={"batch_size": 1})) == {}
    assert speeds(config(runner="vllm", runner_args={"batch_size": 2}))


@pytest.mark.demo
def test_the_doctor_says_what_is_known_and_clears_it(tmp_path):
    remember(config(runner="vllm"), summary(10_000, 40, load=50))
    path = tmp_path / "c.yaml"
    path.write_text("model: demo\nspeculation: {method: none}")
    remember(config(runner="huggingface", speculation={"method": "none"}), summary(10_000, 20, load=3))
    told = CliRunner().invoke(app, ["doctor", "-c", str(path)]).stderr
    assert f"speeds of earlier runs, of 1 models, for `runner: auto`: {cache_dir() / 'speeds'}" in told
    assert "huggingface in the latest 1 runs with these settings, loads in 3.0 s, 2.00 ms per token" in told
    cleared = CliRunner().invoke(app, ["doctor", "--clear-speeds"])
    assert (cleared.exit_code, "cleared the speeds of 1 models" in cleared.stderr) == (0, True)
    assert speeds(config()) == {}
    assert "speeds of earlier runs" not in CliRunner().invoke(app, ["doctor"]).stderr


def test_one_runner_tells_of_the_other():
    seconds = expected_seconds({"huggingface": Speed(2.0, 8e-3, 10**9, 5)}, TOKEN_S["CPU"], 1000)
    assert seconds == {"huggingface": pytest.approx(10.0), "vllm": pytest.approx(88.0)}


@pytest.mark.parametrize(
    "text",
    [
        *["", "[]", '{"vllm": 3}', '{"vllm": {"load_s": 1.0, "token_s": 0.1}}', '{"settings": []}'],
        *['{"settings": {"a": 3}}', '{"settings": {"a": [{"load_s": "x"}]}}'],
    ],
)
def test_a_broken_memory_is_none(text):
    remember(config(runner="vllm"), summary(1000, 20))
    (path,) = cache_dir().rglob("*.json")
    path.write_text(text)
    assert speeds(config()) == {}


@pytest.mark.demo
def test_a_run_says_what_was_chosen_and_resumes_whatever_is_chosen_later(tmp_path, monkeypatch):
    path = tmp_path / "in.jsonl"
    path.write_text('{"query": "Who?"}\n')
    asked = config(input=str(path), output=str(tmp_path / "out.jsonl"), sampling={"max_new_tokens": 2})
    done = generate(asked)
    assert done.about["config"]["runner"] == "huggingface"
    assert sum("runner: huggingface, as chosen by auto" in note for note in done.notes) == 1
    again = generate(asked.model_copy(update={"order": "finish"}))
    assert (again.skipped, again.records) == (1, 0)


def test_an_output_keeps_the_runner_that_began_it():
    remember(config(runner="huggingface"), summary(10_000, 40))
    remember(config(runner="vllm"), summary(10_000, 20, load=60))
    assert choose_runner(config(), 1000).config.runner == "vllm"
    chosen = choose_runner(config(), 1000, "huggingface")
    assert (chosen.config.runner, chosen.why.endswith("it began the output")) == ("huggingface", True)


def test_a_limit_counts_for_prompts_too(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    path = tmp_path / "in.jsonl"
    path.write_text((json.dumps({"query": "?", "contexts": ["long " * 100_000]}) + "\n") * 40)
    assert choose_for_input(config(input=str(path))).config.runner == "vllm"
    assert choose_for_input(config(input=str(path)), limit=1).config.runner == "huggingface"


def test_a_vllm_that_is_broken_ends_no_run(monkeypatch):
    def fail(self):
        raise ImportError("undefined symbol")

    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setattr(Runner, "check", fail)
    assert choose_runner(config(), 10**6).why.endswith("but fails here (ImportError: undefined symbol)")


def test_runners_that_are_no_choice_are_not_remembered():
    remember(build_config({"model": "demo", "runner": "fake"}), summary(1000, 20))
    assert speeds(config()) == {}
    assert expected_seconds({"fake": Speed(0.0, 1.0, 10**6, 1)}, TOKEN_S["CPU"], 10)["huggingface"] < 10


@pytest.mark.parametrize(
    ("capability", "method", "records", "faster"),
    [
        ((9, 0), "context", 16, "huggingface"),
        ((9, 0), "auto", 64, "huggingface"),
        ((9, 0), "context", 256, "vllm"),
        ((8, 0), "none", 16, "vllm"),
        ((7, 5), "context", 16, "vllm"),
    ],
)
def test_on_a_gpu_the_measured_table_decides_by_drafts_and_records_at_once(
    capability, method, records, faster, monkeypatch
):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setattr(choice, "gpu_capability", lambda: capability)
    prior = prior_token_s(config(speculation={"method": method}), records)
    assert min(prior, key=prior.get) == faster
    few = prior_token_s(config(speculation={"method": method}, runner_args={"batch_size": 16}), 10**6)
    if capability >= choice.GRAPHS:
        assert few == prior_token_s(config(speculation={"method": method}), 16)


def test_what_a_run_has_measured_outweighs_the_table_of_another_gpu(monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setattr(choice, "gpu_capability", lambda: (9, 0))
    for runner, seconds in (("huggingface", 40), ("vllm", 20)):
        remember(config(runner=runner), summary(100_000, seconds, load=1))
    assert choose_runner(config(), 10**4).config.runner == "vllm"


def test_the_statistics_say_what_was_expected_and_what_came(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "LOADING_S", {"huggingface": 5.0, "vllm": 80.0})
    (tmp_path / "in.txt").write_text("Why?\n")
    given = {"input": str(tmp_path / "in.txt"), "output": str(tmp_path / "out.jsonl")}
    chosen = choose_for_input(config(**given))
    assert set(chosen.expected_s) == {"huggingface", "vllm"}
    fake = choice.RunnerChoice(chosen.config.model_copy(update={"runner": "fake"}), chosen.why, chosen.expected_s)
    monkeypatch.setattr("ragspec.run.generate.choose_runner", lambda *given, **named: fake)
    about = generate(config(**given)).about["runner_choice"]
    assert about["expected_s"]["vllm"] - about["expected_s"]["huggingface"] == pytest.approx(75, abs=1)
    assert about["took_s"] >= 0
    assert about["runner"] == "fake"
    assert choice.RunnerChoice(config(runner="fake")).about() == {}
