"""The benchmark's parts: intervals that hold, peers as their users run them, passes that survive an interruption."""

import json
import random
from dataclasses import replace
from io import StringIO
from math import exp

import pytest
from rich.console import Console

from ragspec.benchmark.comparison import interval
from ragspec.benchmark.details import pieces, print_results
from ragspec.benchmark.passes import Answer
from ragspec.benchmark.plan import baseline_of, make_plan
from ragspec.benchmark.results import Part, Phase, Piece, Profile, read_results
from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.records import Sampling
from tests.cli.test_cli import ragspec
from tests.conftest import SAMPLE, write_jsonl
from tests.report.test_report import results, run  # noqa: F401 (a fixture)


@pytest.mark.parametrize("pairs", [2, 3, 5, 20])
def test_95_of_100_intervals_hold_the_truth(pairs):
    rng = random.Random(pairs)
    truth, held = 1.3, 0
    for _ in range(3000):
        ratios = [truth * exp(rng.gauss(0, 0.1)) for _ in range(pairs)]
        middle, low, high = interval(ratios)
        assert low <= middle <= high
        held += low <= truth <= high
    assert 0.935 < held / 3000 < 0.97  # drawn out to the median, a little more than 95


def test_one_pair_has_no_interval():
    assert interval([1.5]) == (1.5, None, None)


def config(**more):
    return build_config({"model": "m", "input": "x", "runner_args": {"batch_size": 4, "dtype": "float32"}, **more})


def test_peers_are_run_as_their_users_run_them():
    plan = make_plan(
        config(speculation={"method": "context"}),
        [],
        [8],
        [],
        [],
        ["hf", "hf-lookup", "vllm", "vllm-ngram", "vllm-suffix"],
    )
    peers = {c.name: c for c in plan if c.peer}
    assert list(peers) == ["peer-hf", "peer-hf-lookup", "peer-vllm", "peer-vllm-ngram", "peer-vllm-suffix"]
    assert peers["peer-hf"].config.runner_args == {"engine": "transformers", "batch_size": 1}
    assert peers["peer-hf-lookup"].config.speculation.method == "prompt_lookup"
    assert peers["peer-vllm"].config.runner_args == {"lookahead": 1, "guard": False, "batch_size": 8}
    assert peers["peer-vllm-ngram"].config.speculation.num_tokens == 8
    assert baseline_of(plan[1], plan).name == "none-b8"
    with pytest.raises(ConfigError, match=r'--peer: "vlm" is not known; did you mean "vllm"'):
        make_plan(config(), peers=["vlm"])


def test_runners_are_compared_in_what_each_has():
    own = config(speculation={"method": "early_exit", "early_exit_layer": 4})
    plan = make_plan(own, ["none", "early_exit", "suffix"], runner_names=["huggingface", "vllm"])
    assert [c.name for c in plan] == ["huggingface-none", "huggingface-early_exit", "vllm-none", "vllm-suffix"]
    assert plan[0].config.runner_args["dtype"] == "float32"
    assert plan[2].config.runner_args == {}
    assert baseline_of(plan[3], plan).name == "vllm-none"


class Letters:
    """Bytes as tokens, so that a character may take several."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


def test_pieces_say_where_every_token_came_from():
    ids = list("né!".encode())
    answer = Answer("a", ids, [1], Sampling(), guessed=[0, 1, 1, 0], copied_tokens=[(1, 3, "d1")])
    assert pieces(answer, Letters()) == (
        Piece("n", "target", None),
        Piece("", "draft", "d1"),
        Piece("é", "draft", "d1"),
        Piece("!", "target", None),
    )


def passes_of(done):
    return [line for line in done.stderr.splitlines() if ": pass " in line and line.endswith(" ...")]


def test_an_interrupted_benchmark_goes_on(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("runner: fake\nsampling: {max_new_tokens: 4}")
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": str(i), "prompt": f"p {i}"} for i in range(3)])
    command = ["benchmark", "-c", path, "-i", source, "-m", "none", "-o", tmp_path / "b"]
    assert len(passes_of(ragspec(*command, "--repeat", 1))) == 1
    again = ragspec(*command, "--repeat", 3, "--resume")
    assert again.returncode == 0, again.stderr
    assert passes_of(again) == ["none: pass 2 of 3 ...", "none: pass 3 of 3 ..."]
    assert "none: pass 3 of 3: " in again.stderr
    assert "passes kept from an earlier run: 1" in again.stderr
    assert len(json.loads((tmp_path / "b" / "results.json").read_text())["runs"]) == 3
    nothing_left = ragspec(*command, "--repeat", 3, "--resume")
    assert passes_of(nothing_left) == []
    assert nothing_left.returncode == 0
    write_jsonl(tmp_path / "in.jsonl", [{"id": "0", "prompt": "another"}])
    assert len(passes_of(ragspec(*command, "--repeat", 2, "--resume"))) == 2  # another input: nothing is kept


def test_an_answer_that_differs_in_one_pass_alone_is_told(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("runner: fake\nsampling: {max_new_tokens: 4}")
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": str(i), "prompt": f"p {i}"} for i in range(3)])
    command = ["benchmark", "-c", path, "-i", source, "-m", "none", "-m", "prompt_lookup", "-o", tmp_path / "b"]
    assert ragspec(*command, "--repeat", 1).returncode == 0
    done = tmp_path / "b" / "passes" / "prompt_lookup.json"
    first = json.loads(done.read_text())
    assert first["answers"][0].keys() == {"0", "1", "2"}
    first["answers"][0]["1"] = "of other tokens"
    done.write_text(json.dumps(first))
    again = ragspec(*command, "--repeat", 2, "--resume")
    assert again.returncode == 0, again.stderr
    runs = json.loads((tmp_path / "b" / "results.json").read_text())["runs"]
    assert [(run["name"], run["identical"]) for run in runs] == [
        *(("none", 3), ("none", 3), ("prompt_lookup", 2), ("prompt_lookup", 3)),
    ]
    (row,) = [line for line in again.stderr.splitlines() if line.startswith("prompt_lookup ") and " of " in line[-8:]]
    assert row.endswith("2 of 3")  # the verdict may begin with the name too, as the speeds fall out
    assert "Answers differ from plain decoding in prompt_lookup (1)" in (tmp_path / "b" / "report.html").read_text()


def test_passes_are_shown_as_one(results):  # noqa: F811
    first, second = (
        run("context", "context", speed, repeat=number, acceptance_rate=rate, tokens_per_step=steps, identical=same)
        for number, speed, rate, steps, same in ((1, 30.0, 0.0, 1.0, 10), (2, 20.0, 0.5, 2.0, 9))
    )
    typical = replace(results, runs=(run("none", "none", 20.0), second, first)).typical("context")
    assert (typical.tokens_per_s, typical.decode_tokens_per_s) == (25.0, 50.0)
    assert (typical.acceptance_rate, typical.tokens_per_step, typical.identical) == (0.25, 1.5, 9)


def test_a_profile_shows_every_second_and_how_far_it_is_from_its_bound(results, tmp_path):  # noqa: F811
    parts = {"linear layers": Part(3.0, 2.0), "attention": Part(1.0, None)}
    profile = Profile(10.0, 0.5, {"prompts": Phase(20, 4.0, parts), "decoding": Phase(0, 0.0, {})})
    found = replace(results, details={"none": None, "context": replace(results.details["context"], profile=profile)})
    console = Console(file=StringIO(), width=100)
    print_results(console, found, tmp_path)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "context: where 10.0 s went" in lines
    assert "prompts (20 steps) linear layers 3.00 30% 1.50x" in lines
    assert "prompts (20 steps) attention 1.00 10%" in lines
    assert "all drafting 0.50 5%" in lines
    assert "all everything else 5.50 55%" in lines


def test_a_report_is_drawn_again_from_results_alone(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(f"runner: fake\ninput: {SAMPLE}\nsampling: {{max_new_tokens: 4}}")
    out = tmp_path / "b"
    assert ragspec("benchmark", "-c", path, "-m", "none", "-o", out, "--repeat", 1).returncode == 0
    first = (out / "report.html").read_text()
    for name in ("report.html", "passes/none.json", "outputs/none.jsonl"):
        (out / name).unlink()
    assert ragspec("report", out).returncode == 0
    assert (out / "report.html").read_text() == first


def test_results_are_the_same_after_a_way_through_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(f"runner: fake\ninput: {SAMPLE}\nsampling: {{max_new_tokens: 4}}")
    out = tmp_path / "b"
    methods = ["-m", "none", "-m", "prompt_lookup"]
    assert ragspec("benchmark", "-c", path, *methods, "-o", out, "--repeat", 2, "--limit", 3).returncode == 0
    written = json.loads((out / "results.json").read_text())
    assert json.loads(json.dumps(read_results(out).to_json())) == written
    assert next(iter(written["runs"][0])) == "name"


@pytest.mark.parametrize(
    ("spoil", "key"),
    [
        (lambda whole: whole.pop("details"), "details: Field required"),
        (lambda whole: whole["runs"][1].pop("peer"), "runs.1.peer: Field required"),
        (lambda whole: whole["runs"][0].update(records="many"), "runs.0.records: "),
    ],
)
def test_results_of_another_shape_are_refused_with_their_key(results, tmp_path, spoil, key):  # noqa: F811
    whole = results.to_json()
    spoil(whole)
    (tmp_path / "results.json").write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=rf"results\.json: {key}.*run it again"):
        read_results(tmp_path)


def test_a_report_of_nothing_is_one_line(tmp_path):
    done = ragspec("report", tmp_path)
    assert done.returncode == 2
    assert "results.json: No such file or directory; give the folder of a finished benchmark" in done.stderr
