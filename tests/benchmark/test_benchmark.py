import io
import json
import subprocess

import pytest
from rich.console import Console

from ragspec.benchmark.measure import run_benchmark
from ragspec.benchmark.plan import make_plan
from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.report.page import render
from tests import warm
from tests.cli.test_cli import ragspec
from tests.conftest import SAMPLE, read_jsonl, write_jsonl

RUN_KEYS = {
    *("name", "runner", "method", "batch_size", "num_tokens", "repeat", "records", "output_tokens", "tokens_per_s"),
    *("decode_tokens_per_s", "acceptance_rate", "mean_acceptance_length", "tokens_per_step", "identical"),
    "peak_memory_gib",
}


def test_plan_is_the_product_with_the_baseline_first():
    config = build_config({"model": "m", "input": "x", "speculation": {"method": "draft_model", "draft_model": "d"}})
    assert [c.name for c in make_plan(config, [], [], [])] == ["none", "draft_model"]
    names = [c.name for c in make_plan(config, ["draft_model", "prompt_lookup", "none"], [1, 2], [3])]
    assert [c.name for c in make_plan(config, ["none"], [1, 1], [])] == ["none-b1"]
    assert names[:2] == ["none-b1", "none-b2"]
    assert names[2:] == ["draft_model-b1-k3", "draft_model-b2-k3", "prompt_lookup-b1-k3", "prompt_lookup-b2-k3"]


def test_a_plan_refuses_what_a_run_would_refuse():
    config = build_config({"model": "m", "input": "x"})
    with pytest.raises(ConfigError, match=r"--method draft_model: speculation\.draft_model: missing"):
        make_plan(config, ["draft_model"], [], [])
    with pytest.raises(ConfigError, match="a benchmark reads its input several times"):
        make_plan(build_config({"model": "m", "input": "-"}), [], [], [])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"methods": ["contxt"]}, r'^--method: "contxt" is not known; did you mean "context"\?$'),
        ({"methods": ["contxt"], "runner_names": ["huggingface", "vllm"]}, '^--method: "contxt" is not known'),
        ({"runner_names": ["vlm", "huggingface"]}, r'^--runner: "vlm" is not known; did you mean "vllm"\?$'),
        ({"methods": ["eagle"], "runner_names": ["fake", "huggingface"]}, 'runner "fake" does not have "eagle"'),
    ],
)
def test_a_plan_leaves_out_nothing_that_no_runner_has(asked, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(build_config({"model": "m", "input": "x"}), **asked)


def test_the_structured_peer_is_for_structured_answers():
    config = build_config({"model": "m", "input": "x", "structured": {"choice": ["a"]}})
    peer = make_plan(config, ["none"], peers=["hf-structured"])[-1]
    assert (peer.name, peer.config.structured) == ("peer-hf-structured", config.structured)
    assert peer.config.runner_args["engine"] == "transformers"
    with pytest.raises(
        ConfigError, match="--peer hf-structured: the config has no `structured` section; use --peer hf"
    ):
        make_plan(build_config({"model": "m", "input": "x"}), ["none"], peers=["hf-structured"])


def test_flags_set_the_draft_and_the_answer_apart(tmp_path):
    """`--num-tokens`, the name of before, still means the draft's length."""
    config, out = tmp_path / "c.yaml", tmp_path / "b"
    config.write_text(f"runner: fake\ninput: {SAMPLE}\nsampling: {{max_new_tokens: 50}}")
    args = ["-m", "prompt_lookup", "--draft-tokens", 2, "--num-tokens", 3, "--max-new-tokens", 5]
    done = ragspec("benchmark", "-c", config, *args, "--repeat", 1, "--limit", 2, "-o", out)
    assert done.returncode == 0, done.stderr
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert [(run["name"], run["num_tokens"], run["output_tokens"]) for run in runs] == [
        ("prompt_lookup-k2", 2, 10),
        ("prompt_lookup-k3", 3, 10),
    ]


@pytest.mark.parametrize("sequential", [pytest.param(False, marks=pytest.mark.long), True])
def test_methods_are_timed_in_processes_of_their_own_and_compared(tiny, tmp_path, sequential):
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {tiny}\ninput: {SAMPLE}\nsampling: {{max_new_tokens: 12}}\nprompt: {{max_prompt_tokens: 300}}"
    )
    out = tmp_path / "bench"
    args = ["-m", "prompt_lookup", "-m", "none", "--batch-size", 1, "--repeat", 2, "--limit", 4, "-o", out]
    done = warm.ragspec(
        tmp_path, "benchmark", "-c", config, *args, *(["--sequential", "--profile"] if sequential else [])
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((out / "results.json").read_text())
    assert [(run["name"], run["repeat"]) for run in results["runs"]] == [
        *(("none-b1", 1), ("none-b1", 2), ("prompt_lookup-b1", 1), ("prompt_lookup-b1", 2)),
    ]
    for run in results["runs"]:
        assert run.keys() >= RUN_KEYS
        assert (run["records"], run["identical"], run["output_tokens"]) == (4, 4, 48)
    ratio = results["ratios"][0]
    assert (ratio["name"], ratio["baseline"], ratio["metric"]) == ("prompt_lookup-b1", "none-b1", "tokens_per_s")
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert results["machine"]["cores"] >= 1
    assert len(read_jsonl(out / "outputs" / "none-b1.jsonl")) == 4
    order = [line.split(":")[0] for line in done.stderr.splitlines() if ": pass " in line and line.endswith(" ...")]
    pairs = ["none-b1", "prompt_lookup-b1", "prompt_lookup-b1", "none-b1"]
    assert order == (sorted(pairs) if sequential else pairs)
    said = " ".join(done.stderr.split())
    assert "Every answer is, token for token, that of plain decoding." in said
    assert f"timed: {tiny}; greedy; at most 12 tokens an answer; prompts included" in said
    profiles = [detail["profile"] for detail in results["details"].values()]
    if not sequential:
        assert profiles == [None, None]
        return
    for profile in profiles:
        assert sum(phase["seconds"] for phase in profile["phases"].values()) < profile["seconds"]
        for phase in profile["phases"].values():
            assert phase["steps"] > 0
            assert {name: part["bound_s"] is None for name, part in phase["parts"].items()} == {
                **{"linear layers": False, "attention": False},
                "small operators": True,
            }


@pytest.mark.parametrize(("restart", "processes"), [(False, 1), (True, 3)])
def test_a_pass_can_have_a_process_of_its_own(tmp_path, monkeypatch, restart, processes):
    config = build_config({"runner": "fake", "input": str(SAMPLE)})
    started = []

    class Counted(subprocess.Popen):
        def __init__(self, command, **more):
            super().__init__(command, **more)
            started.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Counted)
    plan = make_plan(config, ["none"], [], [])
    console = Console(file=io.StringIO())
    results = run_benchmark(plan, tmp_path, repeat=3, limit=2, sequential=True, console=console, restart=restart)
    assert len(set(started)) == len(started) == processes
    assert [run.repeat for run in results.runs] == [1, 2, 3]


@pytest.mark.slow
def test_failed_records_are_in_the_results(tmp_path):
    """The figures are those of the others."""
    records = [*read_jsonl(SAMPLE)[:4], {"id": "no question"}]
    given = {"runner": "fake", "input": write_jsonl(tmp_path / "in.jsonl", records)}
    plan = make_plan(build_config(given | {"runner_args": {"fail_ids": [records[0]["id"]]}}), ["none"], [], [])
    console = Console(file=io.StringIO())
    results = run_benchmark(plan, tmp_path, repeat=1, limit=None, sequential=True, console=console)
    assert results.notes == ("none: 2 of 5 records failed; figures are of the others",)
    assert results.notes[0] in render(results)


def test_a_benchmark_of_nothing_is_an_error(tmp_path):
    config, empty = tmp_path / "c.yaml", tmp_path / "in.jsonl"
    config.write_text("runner: fake")
    empty.write_text("broken\n")
    done = ragspec("benchmark", "-c", config, "-i", empty, "-o", tmp_path / "b")
    assert done.returncode == 2
    assert "none: no record was answered (1 failed)" in done.stderr


@pytest.mark.parametrize("command", ["benchmark", "verify", "tune"])
def test_an_empty_input_is_named_before_anything_loads(tmp_path, command):
    config, empty = tmp_path / "c.yaml", tmp_path / "in.jsonl"
    config.write_text("model: no/such\nrunner: huggingface\nspeculation: {method: context}")
    empty.write_text("\n\n")
    done = ragspec(command, "-c", config, "-i", empty, "-o", tmp_path / "out")
    assert (done.returncode, done.stderr) == (2, f"error: {empty}: contains no records; nothing to answer\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: no/such", 'none: model: "no/such": is not a local folder'),
        ("runner: fake", "nowhere.jsonl: no such file"),
    ],
)
def test_a_benchmark_that_cannot_start_is_one_line(tmp_path, text, message):
    config = tmp_path / "c.yaml"
    config.write_text(text)
    source = "nowhere.jsonl" if "fake" in text else SAMPLE
    done = ragspec("benchmark", "-c", config, "-i", source, "-o", tmp_path / "b")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
