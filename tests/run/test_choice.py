"""runner: auto: what it weighs, and what it says."""

import json

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.models.resolve import cache_dir
from ragspec.run import choice
from ragspec.run.choice import choose, expected, settle
from ragspec.run.experience import Speed, remember, speeds
from ragspec.run.generate import generate
from ragspec.runners.vllm.runner import Runner
from ragspec.stats import RunSummary


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


def test_a_named_runner_is_left_alone():
    assert choose(config(runner="vllm"), 10) == choice.Choice(config(runner="vllm"))


def test_without_vllm_there_is_one_choice(monkeypatch):
    monkeypatch.setattr(choice, "has_vllm", lambda: False)
    chosen = choose(config(), 10**9)
    assert chosen.config.runner == "huggingface"
    assert chosen.why == "runner: huggingface, as chosen by auto: vLLM is not installed"


@pytest.mark.parametrize(
    "more",
    [{"runner_args": {"compile": "off"}}, {"speculation": {"method": "early_exit", "early_exit_layer": 4}}],
)
def test_what_only_our_engine_has_is_answered_there(more, monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    assert choose(config(**more), 10**9).config.runner == "huggingface"


def test_what_only_vllm_has_is_answered_there():
    chosen = choose(config(speculation={"method": "suffix"}, runner_args={"max_model_len": 512}), 1)
    assert chosen.config.runner == "vllm"
    assert chosen.why.endswith("only that has what the config asks for")


def test_the_size_of_the_input_decides(monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    assert choose(config(), 10).config.runner == "huggingface"
    assert choose(config(), None).config.runner == "huggingface"
    chosen = choose(config(), 10**6)
    assert chosen.config.runner == "vllm"
    assert "faster than huggingface, loading included" in chosen.why


def test_prompts_count_as_much_as_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"query": "?", "contexts": ["long " * 1_000_000]}) + "\n")
    assert settle(config(input=str(path))).config.runner == "vllm"
    path.write_text(json.dumps({"query": "?"}) + "\n")
    assert settle(config(input=str(path))).config.runner == "huggingface"
    assert settle(config(input=str(tmp_path / "none.jsonl"))).config.runner == "huggingface"


def test_what_vllm_refuses_is_answered_by_ours(monkeypatch):
    def refuse(self):
        raise ConfigError("it does not know this architecture")

    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setattr(Runner, "check", refuse)
    chosen = choose(config(), 10**6)
    assert chosen.config.runner == "huggingface"
    assert chosen.why.endswith("vLLM would be faster, but it does not know this architecture")


def test_experience_takes_the_place_of_the_priors():
    ours, other = config(runner="huggingface"), config(runner="vllm")
    assert choose(config(), 10**6).config.runner == "huggingface"  # as fast, and sooner loaded
    remember(ours, summary(10_000, 40))
    remember(other, summary(10_000, 20, load=60))
    assert speeds(config()) == {"huggingface": Speed(1.0, 4e-3), "vllm": Speed(60.0, 2e-3)}
    assert choose(config(), 100).config.runner == "huggingface"
    assert choose(config(), 1000).config.runner == "vllm"
    assert speeds(build_config({"model": "another"})) == {}


def test_a_run_that_was_slowed_down_does_not_count_for_long():
    ours = config(runner="huggingface")
    remember(ours, summary(10_000, 640, load=300))
    remember(ours, summary(10_000, 40, load=2))
    assert speeds(config()) == {"huggingface": Speed(2.0, pytest.approx(16e-3))}


def test_one_runner_tells_of_the_other():
    seconds = expected({"huggingface": Speed(2.0, 8e-3)}, "CPU", 1000)
    assert seconds == {"huggingface": 10.0, "vllm": pytest.approx(88.0)}


@pytest.mark.parametrize("text", ["", "[]", '{"vllm": 3}', '{"vllm": {"load_s": 1}}'])
def test_a_broken_memory_is_none(text):
    remember(config(runner="vllm"), summary(1000, 20))
    (path,) = cache_dir().rglob("*.json")
    path.write_text(text)
    assert speeds(config()) == {}


def test_short_runs_teach_nothing():
    remember(config(runner="vllm"), summary(1000, 2))
    assert speeds(config()) == {}


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
    assert choose(config(), 1000).config.runner == "vllm"
    chosen = choose(config(), 1000, "huggingface")
    assert (chosen.config.runner, chosen.why.endswith("it began the output")) == ("huggingface", True)


def test_a_limit_counts_for_prompts_too(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    path = tmp_path / "in.jsonl"
    path.write_text((json.dumps({"query": "?", "contexts": ["long " * 100_000]}) + "\n") * 40)
    assert settle(config(input=str(path))).config.runner == "vllm"
    assert settle(config(input=str(path)), limit=1).config.runner == "huggingface"


def test_a_vllm_that_is_broken_ends_no_run(monkeypatch):
    def fail(self):
        raise ImportError("undefined symbol")

    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setattr(Runner, "check", fail)
    assert choose(config(), 10**6).why.endswith("but it fails here (ImportError: undefined symbol)")


def test_runners_that_are_no_choice_are_not_remembered():
    remember(build_config({"model": "demo", "runner": "fake"}), summary(1000, 20))
    assert speeds(config()) == {}
    assert expected({"fake": Speed(0.0, 1.0)}, "CPU", 10)["huggingface"] < 10
