"""Penalties, biases and logprobs in the engine: those of a plain loop over transformers, whatever is drafted."""

import pytest
import torch

from ragspec.engine import acceptance
from ragspec.engine.model.loaded import prepare
from ragspec.engine.processing import Positions, processed
from ragspec.engine.proposers.base import RowProposer
from ragspec.engine.proposers.draft_model import DraftModel
from ragspec.engine.sampling import Noise, draw
from ragspec.models.logits_processors import GenerationRules
from ragspec.records import Request, Sampling
from ragspec.speculation.drafters.context import ContextDrafter
from tests.conftest import wide
from tests.engine.test_engine import NEW, Fixed, answers, ids, loaded, oracle, ragged, requests_for  # noqa: F401

BIAS = ((7, 3.0), (31, -4.5), (200, 2.5), (201, 2.5), (399, 1.0))
ASKED = [
    {"presence_penalty": 1.7},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -0.6, "presence_penalty": 0.4},
    {"logit_bias": BIAS},
    {"logit_bias": BIAS, "repetition_penalty": 1.3, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    {"temperature": 0.8, "top_k": 40, "logit_bias": BIAS, "presence_penalty": 1.5, "frequency_penalty": 0.7},
]


def penalised(logits, request, answer):
    """Return what vLLM makes of logits, (vocab,): bias, then repetition, frequency and presence penalties."""
    sampling, scores = request.sampling, logits.clone()
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in {*request.token_ids, *answer}:
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(answer):
        scores[token] -= sampling.frequency_penalty * answer.count(token)
        scores[token] -= sampling.presence_penalty
    return scores


@torch.inference_mode()
def by_hand(model, request, eos=()):
    """Return an answer and its raw log-probabilities, (tokens, vocab), from one whole forward per token."""
    sampling, answer, told = request.sampling, [], []
    noise = Noise(sampling.seed, request.id)
    while len(answer) < sampling.max_new_tokens and not set(answer) & set(eos):
        logits = model(torch.tensor([request.token_ids + answer])).logits[0, -1]
        told.append(torch.log_softmax(logits, -1))
        scores = penalised(logits, request, answer)
        if sampling.temperature > 0:
            scores = scores / sampling.temperature
            scores[scores < scores.topk(sampling.top_k).values[-1]] = -torch.inf
            answer += draw(torch.softmax(scores.double(), -1)[None], [noise.at(len(answer))])
        else:
            answer.append(int(scores.argmax()))
    return answer, torch.stack(told)


@pytest.fixture(scope="module")
def plain_model(tiny):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


def ruled(loaded, tiny, *args, **kwargs):  # noqa: F811
    rules = GenerationRules(loaded(tiny)[0].inner, frozenset(), 0)
    return answers(loaded, tiny, *args, **kwargs, processors=lambda r: rules.processors(r.sampling, len(r.token_ids)))


def expected_of(plain_model, requests):
    return {request.index: by_hand(plain_model, request)[0] for request in requests}


@pytest.mark.parametrize("asked", [*wide(*ASKED[:4]), *ASKED[4:]], ids=lambda asked: "-".join(asked))
def test_scores_are_changed_as_in_a_plain_loop_whatever_is_drafted(loaded, tiny, plain_model, asked):  # noqa: F811
    sampling = Sampling(max_new_tokens=NEW, seed=5, **asked)
    expected = expected_of(plain_model, requests_for(loaded(tiny)[1], sampling))
    unchanged = Sampling(max_new_tokens=NEW, seed=5, temperature=sampling.temperature, top_k=sampling.top_k)
    assert expected != expected_of(plain_model, requests_for(loaded(tiny)[1], unchanged))
    assert ids(ruled(loaded, tiny, rows=1, sampling=sampling)) == expected
    assert ids(ruled(loaded, tiny, rows=4, sampling=sampling)) == expected
    guesses = Fixed(oracle(expected, loaded, tiny)), Fixed(ragged(expected, loaded, tiny)), ContextDrafter()
    for drafter in guesses:
        for rows in (1, 4):
            outcomes = ruled(loaded, tiny, RowProposer(drafter, 5, None), rows, sampling=sampling)
            assert ids(outcomes) == expected
            accepted = sum(outcome.spec.accepted for outcome in outcomes.values())
            assert accepted > 9 * NEW // 3 or isinstance(drafter, ContextDrafter)


def test_a_draft_position_that_does_not_see_the_draft_before_it_is_caught(
    loaded,  # noqa: F811
    tiny,
    plain_model,
    monkeypatch,
):
    sampling = Sampling(max_new_tokens=NEW, frequency_penalty=2.0)
    expected = expected_of(plain_model, requests_for(loaded(tiny)[1], sampling))

    def blind(logits, asked):
        rows = [Positions(each.row) for each in asked for _ in range(each.size)]
        return processed(logits, rows)

    monkeypatch.setattr(acceptance, "processed", blind)
    drafter = Fixed(oracle(expected, loaded, tiny))
    assert ids(ruled(loaded, tiny, RowProposer(drafter, 5, None), sampling=sampling)) != expected


@pytest.mark.wide
@pytest.mark.parametrize("asked", ASKED[:5], ids=lambda asked: "-".join(asked))
def test_a_draft_model_is_penalised_as_the_target_is(loaded, tiny, plain_model, asked):  # noqa: F811
    """It is the target, so all that it drafts is right."""
    from transformers import AutoModelForCausalLM

    sampling = Sampling(max_new_tokens=NEW, **asked)
    expected = expected_of(plain_model, requests_for(loaded(tiny)[1], sampling))
    drafting = prepare(AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval())
    drafting.resize(3)
    outcomes = ruled(loaded, tiny, DraftModel(drafting, 400, None, 4, None), 3, sampling=sampling)
    assert ids(outcomes) == expected
    assert all(outcome.spec.accepted == outcome.spec.drafted > 0 for outcome in outcomes.values())


def test_biases_of_single_tokens_are_applied_to_all_positions_at_once(loaded, tiny):  # noqa: F811
    rules = GenerationRules(loaded(tiny)[0].inner, frozenset(), 0)
    assert rules.processors(Sampling(logit_bias=BIAS, temperature=0.5), 9).by_text == []
    assert rules.processors(Sampling(logit_bias=BIAS, presence_penalty=0.5), 9).by_text != []
    assert rules.processors(Sampling(logprobs=3), 9) is None


def test_a_models_own_biases_are_kept_beside_a_records(plain_model, monkeypatch):
    monkeypatch.setattr(plain_model.generation_config, "sequence_bias", [[[7], 1.0], [[4, 9], -2.0]])
    rules = GenerationRules(plain_model, frozenset(), 0)
    logits = torch.zeros(1, 400)
    scores = rules.processors(Sampling(logit_bias=((7, 3.0), (8, 5.0))), 2)(logits, [1, 4])[0]
    assert [scores[token].item() for token in (7, 8, 9, 10)] == [4.0, 5.0, -2.0, 0.0]


# -- logprobs ---------------------------------------------------------------------------------------------------------


def close(told, expected, tokens, most):
    """Return whether what is told of an answer's tokens is what one forward per token gives."""
    assert len(told) == len(tokens) == len(expected)
    for one, row, token in zip(told, expected, tokens, strict=True):
        best = row.topk(most)
        assert one.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert [value for _, value in one.likeliest] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [token for token, _ in one.likeliest] == best.indices.tolist()
    return True


@pytest.mark.parametrize("most", [*wide(0, 1), 5])
@pytest.mark.parametrize("asked", [{}, ASKED[4], ASKED[5]], ids=["greedy", "penalised", "sampled"])
def test_logprobs_are_the_models_own_whatever_is_drafted(loaded, tiny, plain_model, asked, most):  # noqa: F811
    sampling = Sampling(max_new_tokens=NEW, seed=5, logprobs=most, **asked)
    found = {r.index: by_hand(plain_model, r) for r in requests_for(loaded(tiny)[1], sampling)}
    expected = {index: answer for index, (answer, _) in found.items()}
    drafters = Fixed(oracle(expected, loaded, tiny)), Fixed(ragged(expected, loaded, tiny))
    for proposer in (None, *(RowProposer(drafter, 5, None) for drafter in drafters)):
        outcomes = ruled(loaded, tiny, proposer, 4, sampling=sampling)
        assert ids(outcomes) == expected
        assert all(close(outcomes[i].logprobs, logs, answer, most) for i, (answer, logs) in found.items())


def test_only_records_that_ask_are_told_logprobs_and_only_of_tokens_they_keep(loaded, tiny, plain_model):  # noqa: F811
    plain = expected_of(plain_model, requests_for(loaded(tiny)[1]))
    guess = oracle(plain, loaded, tiny)
    end = plain[3][9]
    asked = [
        Request(r.index, r.id, r.token_ids, Sampling(max_new_tokens=NEW, logprobs=2 if r.index == 3 else None))
        for r in requests_for(loaded(tiny)[1])
    ]
    found = answers(loaded, tiny, RowProposer(Fixed(guess), 7, None), requests=iter(asked), eos=[end])
    assert found[3].token_ids == plain[3][: plain[3].index(end) + 1]
    _, expected = by_hand(plain_model, asked[3], eos=[end])
    assert close(found[3].logprobs, expected, found[3].token_ids, 2)
    assert {outcome.logprobs for index, outcome in found.items() if index != 3} == {()}
