"""With `method: auto`, vLLM answers in the mode that should finish first, plain vLLM's own among them."""

import json

import pytest

from ragspec.config.io import InputConfig
from ragspec.config.load import build_config
from ragspec.config.run import to_sampling
from ragspec.records import Request
from ragspec.runners.vllm.modes import (
    MODES,
    OURS,
    RECENT,
    ModeRun,
    expected_ratios,
    first_mode,
    read_runs,
    remember_run,
    worth_restarting,
)
from ragspec.runners.vllm.runner import at_once
from tests.conftest import SAMPLE, read_jsonl, write_jsonl


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path / "cache"))


def run(speed, rows=64, prompt_tokens=50_000, output_tokens=10_000):
    return ModeRun(rows, prompt_tokens, output_tokens, output_tokens / speed)


def test_before_anything_was_measured_the_number_of_rows_decides():
    chosen = [first_mode(rows, asynchronous=True, known={})[0] for rows in (1, 8, 32, 64, 128, 256, 1024)]
    assert chosen == [OURS, OURS, OURS, "none", "none", "none", "none"]
    ratios = [expected_ratios(rows, asynchronous=True, known={})[OURS] for rows in (1, 2, 16, 40, 64, 200, 256, 999)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 2
    assert ratios[-1] == 0.56


def test_where_plain_vllm_is_not_asynchronous_our_drafter_starts_and_pauses_if_it_loses():
    assert {first_mode(rows, asynchronous=False, known={})[0] for rows in (1, 64, 1024)} == {OURS}
    known = {"none": [run(100)], OURS: [run(96)], "suffix": [run(99)]}
    assert first_mode(64, asynchronous=False, known=known)[0] == OURS, "within what a margin leaves open"
    assert first_mode(64, asynchronous=False, known=known | {"suffix": [run(130)]})[0] == "suffix"


def test_what_was_measured_here_counts_for_more_than_what_is_usual():
    known = {"none": [run(100), run(104), run(40)], OURS: [run(150)]}
    mode, expected = first_mode(64, asynchronous=True, known=known)
    assert (mode, expected[OURS]) == (OURS, 1.5)
    assert first_mode(64, asynchronous=True, known=known | {"ngram_gpu": [run(200)]})[0] == "ngram_gpu"
    assert first_mode(16, asynchronous=True, known={"none": [run(100, 16)], OURS: [run(80, 16)]})[0] == "none"


def test_only_runs_alike_are_compared():
    far = {"none": [run(100, rows=4)], OURS: [run(300, rows=4)]}
    assert first_mode(64, asynchronous=True, known=far)[0] == "none", "other numbers of rows"
    other = {"none": [run(100, prompt_tokens=1000)], OURS: [run(300)]}
    assert expected_ratios(64, asynchronous=True, known=other)[OURS] == 0.98, "prompts of another length"
    assert expected_ratios(64, asynchronous=True, known={OURS: [run(300)]})[OURS] == 0.98, "nothing to compare it with"


@pytest.mark.parametrize(
    ("ratio", "host", "left_s", "worth"),
    [
        (0.8, 0.2, 1000, True),  # paused: plain steps that wait for the host
        (1.1, 0.2, 1000, True),
        (1.3, 0.2, 1000, False),
        (0.8, 0.01, 1000, False),  # too little to gain
        (0.8, 0.2, 100, False),  # too late
        (None, 0.5, 1000, False),
    ],
)
def test_a_restart_must_pay_for_itself(ratio, host, left_s, worth):
    assert worth_restarting(ratio, host, left_s, load_s=60) == worth


def test_runs_are_remembered_by_mode_the_latest_ones():
    for speed in range(1, 20):
        remember_run("none", run(speed), ["a", 1])
    remember_run(OURS, run(5), ["a", 1])
    remember_run(OURS, run(5, output_tokens=0), ["a", 1])
    found = read_runs(["a", 1])
    assert [round(each.speed) for each in found["none"]] == list(range(20 - RECENT, 20))
    assert len(found[OURS]) == 1
    assert read_runs(["b", 1]) == {}


@pytest.mark.parametrize("broken", ["", "[]", '{"none": 3}', '{"none": [{"rows": 1}]}', '{"none": [{"rows": "x"}]}'])
def test_a_broken_memory_is_an_empty_one(broken):
    remember_run("none", run(5), ["a"])
    (path,) = MODES.files()
    path.write_text(broken)
    assert read_runs(["a"]) == {}
    remember_run("none", run(7), ["a"])
    assert len(read_runs(["a"])["none"]) == 1


@pytest.mark.parametrize(("records", "rows"), [(0, 1), (1, 1), (91, 91), (2000, 1024)])
def test_no_more_records_are_computed_at_once_than_there_are(tmp_path, records, rows):
    path = write_jsonl(tmp_path / "in.jsonl", [{"query": "Why?"}] * records)
    assert at_once(InputConfig(path=[str(path)]), 1024) == rows


def test_an_input_of_unknown_size_may_fill_the_engine(tmp_path):
    assert at_once(None, 64) == 64
    assert at_once(InputConfig(path=["-"]), 64) == 64
    assert at_once(InputConfig(path=[str(tmp_path / "missing.jsonl")]), 64) == 64


# -- in vLLM ---------------------------------------------------------------------------------------
ARGS = {"enforce_eager": True, "max_model_len": 512, "batch_size": 4, "kv_cache_memory_bytes": 36 << 20, "lookahead": 8}
TEXTS = [" ".join(passage["text"] for passage in record["contexts"]) for record in read_jsonl(SAMPLE)]


def make(demo, **runner_args):
    from ragspec.runners.vllm.runner import Runner

    raw = {"model": demo, "runner": "vllm", "runner_args": {**ARGS, **runner_args}, "speculation": {"method": "auto"}}
    runner = Runner(build_config(raw))
    runner.check()
    return runner


def asked(runner):
    settings = to_sampling(build_config({"runner": "fake", "sampling": {"max_new_tokens": 24}}).sampling)
    encoded = [runner.tokenizer.encode(text, special_tokens=False) for text in TEXTS]
    return [Request(i, f"r{i}", ids, settings, ((0, len(ids)),)) for i, ids in enumerate(encoded)]


@pytest.mark.vllm
@pytest.mark.demo
def test_a_run_goes_on_as_plain_vllm_where_that_finishes_sooner_with_the_same_answers(demo, monkeypatch):
    pytest.importorskip("vllm")
    from ragspec.runners.vllm import runner as module
    from ragspec.runners.vllm import stream
    from ragspec.speculation.methods import PLAIN

    monkeypatch.setattr(stream, "LOOK_S", 0.0)
    monkeypatch.setattr(module, "LEAST_STEPS", 1)
    monkeypatch.setattr(module.Runner, "_plain_beside", lambda self: self._planned(PLAIN))
    judged = []

    def worth(*known):
        judged.append(known)
        return len(judged) == 3

    monkeypatch.setattr(module, "worth_restarting", lambda *known: False)
    with make(demo) as runner:
        expected = {one.index: one.token_ids for one in runner.generate(asked(runner))}
    assert "restarted" not in runner.about()["modes"]
    monkeypatch.setattr(module, "worth_restarting", worth)
    with make(demo, own_process=True) as runner:
        assert runner.about()["modes"] == {"first": OURS, "expected": {"none": 1.0, OURS: 1.89}}
        runner.warm_up(len(TEXTS))
        outcomes = {one.index: one for one in runner.generate(asked(runner))}
    assert {index: one.token_ids for index, one in outcomes.items()} == expected
    found = runner.about()["modes"]["restarted"]
    assert (found["mode"], found["steps"] > 0, 0 < found["host_share"] < 1) == (PLAIN, True, True)
    assert len(judged) == 3
    ratio, _, left_s, load_s = judged[-1]
    assert ratio is None or ratio > 0
    assert left_s > 0 < load_s
    assert json.dumps(runner.about()["modes"])
    assert any("restarted as plain vLLM" in note for note in runner.notes)


@pytest.mark.vllm
@pytest.mark.demo
def test_a_run_starts_as_what_was_fastest_here(demo, monkeypatch):
    pytest.importorskip("vllm")
    from ragspec.runners.vllm.runner import Runner
    from ragspec.speculation.methods import PLAIN

    runner = make(demo)
    assert runner.about()["modes"]["first"] == OURS
    settings = vars(runner)["_plan"].settings()
    for mode, speed in ((PLAIN, 100), (OURS, 90), ("prompt_lookup", 140), ("eagle", 900), ("ngram_gpu", 999)):
        remember_run(mode, run(speed, rows=4), settings)
    runner = make(demo)
    assert runner.about()["modes"] == {
        "first": "prompt_lookup",
        "expected": {"none": 1.0, OURS: 0.9, "prompt_lookup": 1.4},
    }
    assert runner.engine_args["speculative_config"]["method"] == "ngram"
    assert runner.method == "auto"
    assert not runner.cites
    monkeypatch.setattr(Runner, "_plain_beside", lambda self: self._planned(PLAIN))
    remember_run(PLAIN, run(200, rows=4), settings)
    remember_run(PLAIN, run(200, rows=4), settings)
    runner = make(demo)
    assert runner.about()["modes"]["first"] == PLAIN
    assert "speculative_config" not in runner.engine_args
    assert any("starts with none" in note for note in runner.notes)
