"""`ragspec run-batch`: flags, defaults, and a run from file to file."""

import json

import pytest

from tests.cli.test_cli import ragspec
from tests.conftest import read_jsonl, write_jsonl

FAKE = ["--runner", "fake", "--method", "none"]
LINES = [
    {"custom_id": "a", "body": {"model": "m", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 3}},
    {"custom_id": "b", "body": {"prompt": "no", "stream": True}},
]


@pytest.fixture
def batch(tmp_path):
    return write_jsonl(tmp_path / "batch.jsonl", LINES)


def state(tmp_path):
    return json.loads((tmp_path / "out.run.json").read_text())["config"]


def test_a_batch_is_answered_and_gone_on_with(tmp_path, batch):
    command = ["run-batch", "-i", batch, "-o", str(tmp_path / "out.jsonl"), *FAKE, "--model", "m"]
    done = ragspec(*command)
    assert done.returncode == 1, done.stderr  # one line is wrong
    lines = read_jsonl(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in lines] == ["a", "b"]
    assert lines[0]["response"]["body"]["model"] == "m"
    again = ragspec(*command)
    assert "2 finished before" in again.stderr
    assert read_jsonl(tmp_path / "out.jsonl") == lines


def test_what_a_body_does_not_say_is_as_in_openais_api(tmp_path, batch):
    config = tmp_path / "c.yaml"
    config.write_text("runner: fake\nsampling: {top_p: 0.9}\nspeculation: {method: prompt_lookup}\n")
    ragspec("run-batch", "-i", batch, "-o", str(tmp_path / "out.jsonl"), "-c", str(config), "--max-num-seqs", "4")
    found = state(tmp_path)
    sampling = found["sampling"]
    assert (sampling["temperature"], sampling["max_new_tokens"], sampling["top_p"]) == (1.0, 1024, 0.9)
    assert found["speculation"]["method"] == "prompt_lookup"
    assert found["output_format"] == "openai"


def test_flags_win_over_settings_and_both_over_the_defaults(tmp_path, batch):
    flags = [*FAKE, "--max-tokens", "9", "--seed", "5", "--served-model-name", "s", "--set", "sampling.seed=4"]
    out = str(tmp_path / "out.jsonl")
    ragspec("run-batch", "--input-file", batch, "--output-file", out, *flags, "--set", "sampling.temperature=0")
    found = state(tmp_path)
    sampling = found["sampling"]
    assert (sampling["temperature"], sampling["max_new_tokens"], sampling["seed"]) == (0.0, 9, 5)
    assert read_jsonl(out)[0]["response"]["body"]["model"] == "s"


@pytest.mark.parametrize("given", [["--runner", "fake"], ["-c", "fake.yaml"]])
def test_no_method_is_chosen_for_a_runner_without_drafts(tmp_path, batch, given):
    (tmp_path / "fake.yaml").write_text("runner: fake\n")
    ragspec("run-batch", "-i", batch, "-o", str(tmp_path / "out.jsonl"), *given, cwd=tmp_path)
    assert state(tmp_path)["speculation"]["method"] == "none"


@pytest.mark.parametrize("command", ["run-batch", "generate"])
def test_vllms_own_words_for_speculation_are_a_method(tmp_path, batch, command):
    flags = ["--runner", "vllm", "--set", "runner_args.speculative_config={method: ngram, num_speculative_tokens: 3}"]
    done = ragspec(command, "-i", batch, "-o", str(tmp_path / "out.jsonl"), "--model", str(tmp_path / "none"), *flags)
    assert "speculative_config" not in done.stderr
    assert "no such folder" in done.stderr


def test_a_model_is_needed(tmp_path, batch):
    done = ragspec("run-batch", "-i", batch, "-o", str(tmp_path / "out.jsonl"))
    assert done.returncode == 2
    assert "model: missing; give a hub id" in done.stderr


def test_two_forms_of_lines_do_not_mix(tmp_path, batch):
    out = str(tmp_path / "out.jsonl")
    ragspec("run-batch", "-i", batch, "-o", out, *FAKE)
    config = tmp_path / "c.yaml"
    config.write_text("runner: fake\nsampling: {temperature: 1.0, max_new_tokens: 1024}\n")
    done = ragspec("generate", "-c", str(config), "-i", batch, "-o", out)
    assert done.returncode == 2
    assert 'output_format: was "openai", is now null' in done.stderr
