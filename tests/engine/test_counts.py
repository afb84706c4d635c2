"""The counts of every runner add up, on records that end in the middle of a step too."""

import pytest

from ragspec.config.load import build_config
from ragspec.config.run import to_sampling
from ragspec.records import Request
from ragspec.runners import module
from ragspec.stats import SpecStats
from tests.conftest import SAMPLE, read_jsonl


def run(runner_name, folder, method, sampling, **runner_args):
    raw = {
        "runner": runner_name,
        "model": folder,
        "sampling": sampling,
        "speculation": {"method": method},
        "runner_args": runner_args,
    }
    config = build_config(raw)
    runner = module(runner_name).Runner(config)
    runner.check()
    with runner:
        runner.warm_up()
        requests = [
            Request(
                i, f"r{i}", runner.tokenizer.encode(r["query"] * 3, special_tokens=True), to_sampling(config.sampling)
            )
            for i, r in enumerate(read_jsonl(SAMPLE))
        ]
        before = runner.decode_tokens
        outcomes = list(runner.generate(requests))
        return outcomes, runner.decode_tokens - before, runner


def check(outcomes, methods_that_draft=True):
    assert len(outcomes) == 10
    for outcome in outcomes:
        spec = outcome.spec
        assert 0 <= spec.accepted <= spec.drafted
        assert spec.steps + spec.accepted - spec.cut == len(outcome.token_ids)
        assert spec.cut >= 0
        assert sum(length * count for length, count in enumerate(spec.accepted_at)) == spec.accepted
        assert sum(length * count for length, count in enumerate(spec.drafted_at)) == spec.drafted
        assert sum(spec.accepted_at) == sum(spec.drafted_at) <= spec.steps


@pytest.fixture(scope="module")
def stops(tiny):
    """Texts that stand in the middle of answers."""
    outcomes, _, runner = run("huggingface", tiny, "none", {"max_new_tokens": 40}, batch_size=4)
    texts = [runner.tokenizer.decode(outcome.token_ids) for outcome in outcomes]
    return [text[at : at + 3] for text in texts for at in (len(text) // 2,) if text[at : at + 3].isprintable()][:4]


@pytest.mark.parametrize("engine", ["ragspec", "transformers"])
@pytest.mark.parametrize("method", ["none", "prompt_lookup"])
def test_counts_add_up_where_stop_strings_cut_answers(tiny, stops, engine, method):
    assert len(stops) >= 2
    sampling = {"max_new_tokens": 40, "stop": stops}
    outcomes, decode_tokens, _ = run("huggingface", tiny, method, sampling, engine=engine, batch_size=1)
    check(outcomes)
    ended = [outcome for outcome in outcomes if outcome.finish_reason == "stop"]
    assert len(ended) >= 2
    if engine == "ragspec":  # the first token of each comes with the prompt
        assert decode_tokens == sum(len(outcome.token_ids) - 1 for outcome in outcomes)
    if method == "prompt_lookup":
        assert sum(outcome.spec.accepted for outcome in outcomes) > 0


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("method", ["context", "prompt_lookup", "auto"])
def test_counts_of_the_batched_engine_add_up(tiny, stops, method, batch_size):
    outcomes, decode_tokens, _ = run(
        "huggingface", tiny, method, {"max_new_tokens": 40, "stop": stops}, batch_size=batch_size
    )
    check(outcomes)
    assert decode_tokens == sum(len(outcome.token_ids) - 1 for outcome in outcomes)


def test_counts_of_the_fake_runner_add_up():
    outcomes, _, _ = run("fake", "none", "prompt_lookup", {"max_new_tokens": 10})
    check(outcomes)


def test_what_a_step_accepted_beyond_the_end_does_not_count():
    spec = SpecStats()
    spec.record(0, 0)
    spec.record(4, 4)  # five tokens, of which the answer ends with the second
    spec.end(3)
    assert (spec.steps, spec.drafted, spec.accepted, spec.cut) == (2, 4, 2, 1)
    assert spec.accepted_at == [0, 0, 1, 0, 0]
    assert spec.steps + spec.accepted - spec.cut == 3
    whole = SpecStats()
    whole.record(4, 4)
    whole.end(5)
    assert (whole.accepted, whole.cut) == (4, 0)


@pytest.mark.parametrize("method", ["context", "prompt_lookup"])
def test_a_second_pass_begins_as_the_first_did(tiny, method):
    """A drafter that knew the answers of an earlier pass would have nearly all of its drafts accepted."""
    raw = {
        "model": tiny,
        "sampling": {"max_new_tokens": 24},
        "speculation": {"method": method, "num_tokens": 4},
        "runner_args": {"batch_size": 1, "lookahead": 1},
    }
    config = build_config(raw)
    runner = module("huggingface").Runner(config)
    runner.check()
    sampling = to_sampling(config.sampling)
    texts = [record["query"] * 3 for record in read_jsonl(SAMPLE)]
    requests = [
        Request(i, f"r{i}", runner.tokenizer.encode(text, special_tokens=True), sampling)
        for i, text in enumerate(texts)
    ]
    passes = []
    with runner:
        runner.warm_up()
        for _ in range(2):
            outcomes = list(runner.generate(requests))
            passes.append([(o.index, o.spec.drafted, o.spec.accepted, o.token_ids) for o in outcomes])
    assert sum(drafted for _, drafted, _, _ in passes[0]) > 0
    assert passes[0] == passes[1]
