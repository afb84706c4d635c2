"""Penalties, biases and logprobs through the runner: stock generate() and our engine do the same, drafts or not."""

import pytest
import torch
from transformers import LlamaForCausalLM

from ragspec.records import Failure, Request, Sampling
from tests.engine.test_scores import ASKED, close, expected_of, plain_model  # noqa: F401
from tests.runners.test_huggingface import METHODS, answer, make_requests, make_runner, speculation, tokens  # noqa: F401

GREEDY = [asked for asked in ASKED if "temperature" not in asked]
OTHER_IDS = ("tiny_padded", "tiny_gpt2", "tiny_stranger")  # draft models that a bias would reach under other ids


def as_config(asked):
    """Return settings as a config has them."""
    return {key: dict(value) if key == "logit_bias" else value for key, value in asked.items()}


def in_both(tiny, **settings):
    """Return the answers of the engine and of stock generate(), alone and in padded batches."""
    yield answer(tiny, **{**settings, "runner_args": {"engine": "ragspec", "batch_size": 3}})
    for batch_size in (1, 4):
        yield answer(tiny, **{**settings, "runner_args": {"batch_size": batch_size}})


@pytest.fixture(scope="module")
def prompts(tiny):
    runner, sampling = make_runner(tiny)
    return [request.token_ids for request in make_requests(runner, sampling)]


def by_loop(plain_model, prompts, asked):  # noqa: F811
    sampling = Sampling(max_new_tokens=24, **asked)
    return list(
        expected_of(plain_model, [Request(i, f"r{i}", ids, sampling) for i, ids in enumerate(prompts)]).values()
    )


@torch.inference_mode()
def forced(model, prompt, token_ids):
    """Return the log-probabilities, (tokens, vocab), of an answer, in one forward."""
    logits = model(torch.tensor([prompt + token_ids[:-1]])).logits[0, -len(token_ids) :]
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize("asked", GREEDY, ids=lambda asked: "-".join(asked))
def test_both_engines_answer_as_a_plain_loop_does(tiny, plain_model, prompts, asked):  # noqa: F811
    expected = by_loop(plain_model, prompts, asked)
    for generations in in_both(tiny, sampling=as_config(asked)):
        assert sorted(tokens(generations)) == sorted(expected)


@pytest.mark.parametrize("asked", GREEDY[3:], ids=lambda asked: "-".join(asked))
def test_stock_drafts_change_no_answer_and_no_logprob(tiny, plain_model, prompts, speculation, asked, request):  # noqa: F811
    name = request.node.callspec.params["speculation"][1].get("draft_model")
    expected = by_loop(plain_model, prompts, asked)
    generations = answer(tiny, sampling={**as_config(asked), "logprobs": 3}, **speculation)
    assert tokens(generations) == expected
    for prompt, one in zip(prompts, generations, strict=True):
        assert close(one.logprobs, forced(plain_model, prompt, one.token_ids), one.token_ids, 3)
        assert one.undrafted.startswith("logit_bias: ") == (name in OTHER_IDS)
        assert one.spec.steps + one.spec.accepted == len(one.token_ids)
        assert not (one.undrafted and one.spec.drafted)
    assert name in OTHER_IDS or sum(one.spec.drafted for one in generations) > 0


def test_penalties_need_no_batch_of_their_own(tiny, monkeypatch):
    """They look at the answer alone, which padding does not change; repetition_penalty looks at the prompt too."""
    sizes, call = [], LlamaForCausalLM.generate

    def counted(self, *given, **asked):
        sizes.append(len(asked["input_ids"]))
        return call(self, *given, **asked)

    monkeypatch.setattr(LlamaForCausalLM, "generate", counted)
    answer(tiny, sampling=as_config(ASKED[2] | {"logit_bias": ASKED[3]["logit_bias"]}), runner_args={"batch_size": 4})
    assert sizes[-2:] == [4, 1]  # after those that try how the model takes padding
    del sizes[:]
    answer(tiny, sampling={"repetition_penalty": 1.2, "presence_penalty": 0.5}, runner_args={"batch_size": 4})
    assert sizes[-5:] == [1] * 5


@pytest.mark.parametrize("runner_args", [{}, {"batch_size": 1}, {"generate_args": {"num_beams": 3}}], ids=str)
def test_logprobs_in_stock_batches_are_each_records_own(tiny, plain_model, prompts, runner_args):  # noqa: F811
    end = answer(tiny, runner_args={"batch_size": 1})[2].token_ids[5]  # one record ends before the others
    given = {**runner_args.get("generate_args", {}), "eos_token_id": [end]}
    generations = answer(tiny, sampling={"logprobs": 2}, runner_args={**runner_args, "generate_args": given})
    assert len(set(map(len, tokens(generations)))) > 1
    for prompt, one in zip(prompts, generations, strict=True):
        assert close(one.logprobs, forced(plain_model, prompt, one.token_ids), one.token_ids, 2)


def test_logprobs_are_told_only_where_they_are_asked_for(tiny):
    for generations in in_both(tiny):
        assert {one.logprobs for one in generations} == {()}


@pytest.mark.parametrize("engine", ["ragspec", "transformers"])
@pytest.mark.parametrize("token", [400, 10**9, -1])
def test_a_bias_on_a_token_that_there_is_not_is_its_records_failure(tiny, engine, token):
    runner, sampling = make_runner(tiny, runner_args={"engine": engine, "batch_size": 2})
    wrong = Sampling(max_new_tokens=24, logit_bias=((5, 1.0), (token, 1.0)))
    with runner:
        requests = make_requests(runner, sampling)
        requests[1] = Request(1, "r1", requests[1].token_ids, wrong)
        outcomes = {outcome.index: outcome for outcome in runner.generate(requests)}
    assert outcomes.pop(1) == Failure(1, f"logit_bias: the model has no token {token}, only 0 to 399", "RecordError")
    assert len(outcomes) == 4
    assert not [one for one in outcomes.values() if isinstance(one, Failure)]


@pytest.mark.parametrize("method", ["none", "context", "prompt_lookup"])
def test_sampled_answers_are_penalised_the_same_in_the_engine_whatever_drafts(tiny, plain_model, prompts, method):  # noqa: F811
    sampling = Sampling(max_new_tokens=24, **ASKED[5])
    expected = expected_of(plain_model, [Request(i, f"r{i}", ids, sampling) for i, ids in enumerate(prompts)])
    settings = {} if method == "none" else {"num_tokens": 5}
    generations = answer(
        tiny, method, sampling=as_config(ASKED[5]), runner_args={"engine": "ragspec", "batch_size": 3}, **settings
    )
    assert {one.index: one.token_ids for one in generations} == expected
