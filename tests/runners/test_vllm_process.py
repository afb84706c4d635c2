"""vLLM's engine in a process of its own: the same answers, and what happens when either process is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ragspec.config.load import build_config
from ragspec.config.run import to_sampling
from ragspec.errors import ModelError
from ragspec.host.machine import peak_memory
from ragspec.records import Failure, Request, Thinking
from ragspec.run.session import peak_memory_gib
from tests.conftest import ROOT, SAMPLE, read_jsonl

pytestmark = [pytest.mark.vllm, pytest.mark.demo]
ARGS = {"enforce_eager": True, "max_model_len": 512, "batch_size": 4, "kv_cache_memory_bytes": 36 << 20, "lookahead": 8}
TEXTS = [" ".join(passage["text"] for passage in record["contexts"]) for record in read_jsonl(SAMPLE)]


def make(demo, own_process, **speculation):
    from ragspec.runners.vllm.runner import Runner

    raw = {"model": demo, "runner": "vllm", "runner_args": {**ARGS, "own_process": own_process}}
    runner = Runner(build_config({**raw, "speculation": speculation}))
    runner.check()
    return runner


def asked(runner, **sampling):
    settings = to_sampling(build_config({"runner": "fake", "sampling": {"max_new_tokens": 24, **sampling}}).sampling)
    texts = enumerate(TEXTS)
    return [Request(i, f"r{i}", runner.tokenizer.encode(text, special_tokens=False), settings) for i, text in texts]


@pytest.fixture(scope="module")
def expected(demo):
    """What an engine of this process answers, each with its first and last settings."""
    with make(demo, False) as runner:
        assert not runner.about()["own_process"]
        return {i: [one.token_ids for one in ordered(runner.generate(asked(runner, **each)))] for i, each in MIXED}


def ordered(outcomes):
    return sorted(outcomes, key=lambda outcome: outcome.index)


MIXED = list(enumerate([{}, {"temperature": 0.8, "seed": 3}, {"stop": [" the"]}, {"logprobs": 1}]))


@pytest.fixture(scope="module")
def engine(demo):
    """An engine in a process of its own."""
    with make(demo, True) as runner:
        runner.warm_up()
        yield runner


def engine_process(runner):
    (process,) = runner.engine.engine_core.resources.engine_manager.processes
    return process


@pytest.mark.parametrize(("which", "sampling"), MIXED, ids=lambda each: str(each)[:20])
def test_the_answers_are_those_of_an_engine_in_this_process(engine, expected, which, sampling):
    outcomes = ordered(engine.generate(asked(engine, **sampling)))
    assert [one.token_ids for one in outcomes] == expected[which]
    for one in outcomes:
        assert 0 < one.time_to_first_token_s <= one.latency_s
        assert (len(one.logprobs) > 0) == ("logprobs" in sampling)


def test_peak_memory_is_that_of_both_processes(engine, expected):
    ordered(engine.generate(asked(engine)))
    resident, on_gpus = engine.peak_elsewhere
    status = Path(f"/proc/{engine_process(engine).pid}/status").read_text()
    (peak,) = [int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")]
    assert 0 < resident <= peak
    assert on_gpus == 0
    assert peak_memory_gib(engine) == pytest.approx((peak_memory()[0] + resident) / (1 << 30))


def test_a_prefix_cache_that_is_not_emptied_is_noted(engine, monkeypatch):
    from ragspec.runners.vllm import engine as module

    monkeypatch.setattr(module, "RESET_TRIES", 2)
    monkeypatch.setattr(engine.engine, "reset_prefix_cache", lambda: False)
    ordered(engine.generate(asked(engine, max_new_tokens=2)))
    assert any("could not clear its prefix cache" in note for note in engine.notes)
    monkeypatch.undo()
    ordered(engine.generate(asked(engine, max_new_tokens=2)))
    assert not any("prefix cache" in note for note in engine.notes)


def test_a_refused_request_is_a_failure_and_the_others_are_answered(engine, expected):
    requests = asked(engine)
    requests[1] = replace(requests[1], token_ids=[5] * 600)
    outcomes = ordered(engine.generate(requests))
    assert [isinstance(one, Failure) for one in outcomes] == [i == 1 for i in range(len(requests))]
    assert outcomes[0].token_ids == expected[0][0]


def test_requests_are_pulled_as_the_engine_has_room_and_whoever_leaves_early_leaves_nothing(engine, expected):
    pulled = 0
    (first, *_) = asked(engine, max_new_tokens=2)

    def endless():
        nonlocal pulled
        while True:
            pulled += 1
            yield replace(first, index=pulled, id=f"r{pulled}")

    answers = engine.generate(endless())
    for finished in range(1, 60):
        next(answers)
        assert pulled - finished <= 2 * ARGS["batch_size"] + ARGS["lookahead"]
    answers.close()
    assert [one.token_ids for one in ordered(engine.generate(asked(engine)))] == expected[0]


def test_records_that_begin_alike_are_answered_together(engine):
    heads = [" ".join(TEXTS[i : i + 2])[:900] for i in range(4)]
    requests = asked(engine, max_new_tokens=2)[:1] * 32
    encode = engine.tokenizer.encode
    requests = [
        replace(one, index=i, id=f"r{i}", token_ids=encode(f"{heads[i % 4]} {i}", special_tokens=False))
        for i, one in enumerate(requests)
    ]
    cached = sum(one.cached_prompt_tokens for one in engine.generate(requests))
    assert cached > 0.4 * sum(len(one.token_ids) for one in requests)


def test_an_engine_that_dies_is_started_again_once_with_what_is_left(engine, expected):
    outcomes = engine.generate(asked(engine))
    first = next(outcomes)
    engine_process(engine).kill()
    rest = list(outcomes)
    assert [one.token_ids for one in ordered([first, *rest])] == expected[0]
    assert [note for note in engine.notes if "signal 9" in note and "restarted" in note]
    many = [replace(one, index=i, id=f"r{i}") for i, one in enumerate(asked(engine) * 12)]  # more than fit in a queue
    again = engine.generate(many)  # the next run may restart it too
    seen = [next(again)]
    dead = engine_process(engine)
    dead.kill()
    while engine_process(engine) is dead:  # what had come before its end
        seen.append(next(again))
    engine_process(engine).kill()
    with pytest.raises(ModelError, match=r"signal 9\) again, after a restart; finished answers are kept") as caught:
        seen += again
    assert "\n" not in str(caught.value)
    assert len(seen) < len(many)
    assert all(one.token_ids == expected[0][one.index % len(TEXTS)] for one in seen)


def test_a_run_that_begins_with_a_dead_engine_starts_it_again(engine, expected):
    process = engine_process(engine)
    process.kill()
    process.join()
    assert [one.token_ids for one in ordered(engine.generate(asked(engine)))] == expected[0]


def test_an_engine_that_is_told_to_end_gives_up_no_record(engine, expected):
    """On SIGTERM vLLM ends all requests as aborted before its process ends."""
    outcomes = engine.generate(asked(engine))
    first = next(outcomes)
    engine_process(engine).terminate()
    assert [one.token_ids for one in ordered([first, *outcomes])] == expected[0]


def test_a_client_that_waits_for_a_dead_engine_is_woken(engine, expected):
    """vLLM's own would wait for ever."""
    process = engine_process(engine)
    os.kill(process.pid, signal.SIGSTOP)  # it takes requests and answers none
    threading.Timer(1.0, process.kill).start()
    started = time.monotonic()
    assert [one.token_ids for one in ordered(engine.generate(asked(engine)))] == expected[0]
    assert time.monotonic() > started


def test_our_drafter_cites_and_counts_from_the_engines_process(demo, expected):
    """Also where rows are preempted, aborted, constrained, or need no drafts."""
    with make(demo, True, method="context", num_tokens=6) as runner:
        assert runner.cites
        requests = [replace(one, passages=((0, len(one.token_ids)),)) for one in asked(runner)]
        outcomes = ordered(runner.generate(requests))
        assert [one.token_ids for one in outcomes] == expected[0]
        cited = 0
        for request, one in zip(requests, outcomes, strict=True):
            assert one.spec.steps + one.spec.accepted - one.spec.cut == len(one.token_ids)
            assert len(one.guessed) == len(one.token_ids)
            for copy in one.copied:
                length = copy.end - copy.start
                assert one.token_ids[copy.start : copy.end] == request.token_ids[copy.source : copy.source + length]
                cited += length
        assert cited > 10
        assert sum(one.spec.accepted for one in outcomes) > 10
        assert runner.about()["drafting_s"] > 0

        plain = [one.token_ids for one in outcomes]
        unlike = next(token for token in range(100, 200) if token not in plain[1])
        requests[1] = replace(requests[1], sampling=replace(requests[1].sampling, logit_bias=((unlike, 100.0),)))
        requests[2] = replace(requests[2], grammar='start: "yes" | "no"')
        text = runner.tokenizer.decode(plain[3])
        stops = replace(requests[3].sampling, stop=(text[len(text) // 2 :][:4],))
        requests[3] = replace(requests[3], sampling=stops, thinking=Thinking("<think>", "</think>"))
        text = runner.tokenizer.decode(plain[4])
        stops = replace(requests[4].sampling, stop=(text[len(text) // 2 :][:4],))  # vLLM itself looks for this one
        requests[4] = replace(requests[4], sampling=stops)
        mixed = ordered(runner.generate(requests))
        assert mixed[1].undrafted.startswith("logit_bias: ")
        assert set(mixed[1].token_ids) == {unlike}
        assert mixed[1].spec.drafted == 0
        assert runner.tokenizer.decode(mixed[2].token_ids) in ("yes", "no")
        assert mixed[3].finish_reason == "stop"
        assert len(mixed[3].guessed) == len(mixed[3].token_ids) < len(plain[3])
        assert mixed[4].finish_reason == "stop"
        assert len(mixed[4].guessed) == len(mixed[4].token_ids) < len(plain[4])
        assert [one.token_ids for one in mixed[5:]] == plain[5:]
        requests[4] = replace(requests[4], sampling=requests[5].sampling)
        first = next(outcomes := runner.generate(requests[4:]))  # it drafts and cites after a restart, too
        engine_process(runner).kill()
        again = ordered([first, *outcomes])
        assert [one.token_ids for one in again] == plain[4:]
        assert sum(one.spec.accepted for one in again) > 0


@pytest.mark.wide
def test_vllms_own_drafts_are_timed_and_counted_in_the_engines_process(demo, expected):
    with make(demo, True, method="prompt_lookup") as runner:
        outcomes = ordered(runner.generate(asked(runner)))
        assert [one.token_ids for one in outcomes] == expected[0]
        assert all(one.spec.steps + one.spec.accepted - one.spec.cut == len(one.token_ids) for one in outcomes)
        assert "guard" in runner.about()


@pytest.mark.wide
def test_our_drafter_drafts_where_vllms_devices_have_processes_of_their_own(demo, expected, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # its CPU build then has a process for the device
    with make(demo, True, method="context", num_tokens=6) as runner:
        assert not runner.cites
        outcomes = ordered(runner.generate(asked(runner)))
        assert [one.token_ids for one in outcomes] == expected[0]
        assert sum(one.spec.accepted for one in outcomes) > 0
        assert runner.about()["drafting_s"] > 0
        assert any("no passage is cited" in note for note in runner.notes)


SCRIPT = """
import ragspec
config = {config!r}
with ragspec.Pipeline(ragspec.load_config(config)) as pipeline:
    for line in pipeline.answers([{{"id": "a", "query": "Why?"}}]):
        print(line["id"], len(line["output"]) > 0)
"""


@pytest.mark.wide
def test_a_script_without_a_main_guard_may_have_an_engine_in_another_process(demo, tmp_path):
    config = {"model": demo, "runner": "vllm", "sampling": {"max_new_tokens": 4}}
    config["runner_args"] = {**ARGS, "own_process": True}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(config=config))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "a True\n"
