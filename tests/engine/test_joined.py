"""Passages and a draft model in one step, and drafts that were sampled: which of them count is settled before."""

import pytest
import torch

from ragspec.config.load import build_config
from ragspec.config.run import to_sampling
from ragspec.engine import backend
from ragspec.engine.engine import EngineSettings
from ragspec.engine.model.loaded import prepare
from ragspec.engine.proposers import base as proposers
from ragspec.engine.proposers.base import AutoProposer, RowProposer
from ragspec.engine.proposers.draft_model import DraftModel, HybridProposer
from ragspec.models.logits_processors import GenerationRules
from ragspec.records import Request, Sampling
from ragspec.runners.huggingface import runner as huggingface
from ragspec.speculation import method_selector as trial_module
from ragspec.speculation.draft_length import Confidence, DraftLength
from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.method_selector import MethodSelector
from ragspec.speculation.step_cost import StepCost
from tests.conftest import wide
from tests.engine.test_engine import CHEAP, NEW, Fixed, answers, ids, loaded, oracle, plain, requests_for  # noqa: F401

SAMPLED = Sampling(max_new_tokens=NEW, temperature=0.8, seed=3)


class Counting(DraftModel):
    """Notes for how many rows of each step it was asked."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = []

    def drafts(self, rows, asked):
        self.asked.append((len(asked), len(rows)))
        return super().drafts(rows, asked)


def both(loaded, draft, guess, num_tokens=4, cost=None, rows=4):  # noqa: F811
    """Return a proposer of the two, and the model's part of it."""
    inner = loaded(draft)[0]
    inner.resize(rows)
    passages = RowProposer(Fixed(guess), num_tokens, cost)
    model = Counting(inner, 400, None, num_tokens, cost)
    return AutoProposer(
        {"passages": passages, "both": HybridProposer(passages, model, cost)}, MethodSelector(["both"])
    ), model


@pytest.mark.parametrize("num_tokens", [4, None])
def test_the_model_drafts_where_the_passages_promise_less(loaded, tiny, tiny_draft, plain, num_tokens):  # noqa: F811
    """The passages are right for the first half of each answer, and say nothing after it."""
    right, half = oracle(plain, loaded, tiny), NEW // 2
    used = []

    def guess(tokens, prompt_tokens):
        written = len(tokens) - prompt_tokens
        used.append(written < half)
        return right(tokens, prompt_tokens)[: max(0, half - written)]

    proposer, model = both(loaded, tiny_draft, guess, num_tokens, CHEAP)
    outcomes = answers(loaded, tiny, proposer, cost=CHEAP)
    assert ids(outcomes) == plain
    assert any(used)
    counts = [asked for asked, _ in model.asked]
    assert 0 < sum(counts) < sum(rows for _, rows in model.asked)
    accepted = sum(outcome.spec.accepted for outcome in outcomes.values())
    assert accepted >= len(plain) * (half - 4)  # the target writes one a step


def test_what_is_sampled_is_repeatable_with_both(loaded, tiny, tiny_draft):  # noqa: F811
    def guess(tokens, prompt_tokens):
        return tokens[-2:] if len(tokens) % 2 else []

    def sampled(rows):
        proposer, model = both(loaded, tiny_draft, guess, 3, None, rows)
        outcomes = answers(loaded, tiny, proposer, rows, sampling=SAMPLED)
        assert sum(asked for asked, _ in model.asked) > 0
        return ids(outcomes)

    assert sampled(4) == sampled(4)


def test_auto_tries_the_passages_and_the_draft_model_together(tiny, tiny_draft, monkeypatch):
    monkeypatch.setattr(trial_module, "SHARE", 1e6)  # turns from the first steps on,
    monkeypatch.setattr(trial_module, "UNKNOWN", 1e3)  # whatever they lose
    expected = []  # of plain steps, and what it said at first

    def settings(**given):
        expected.append((given["plain"], given["plain"](3, 3, 9)))
        return EngineSettings(**given)

    monkeypatch.setattr(backend, "EngineSettings", settings)
    config = build_config(
        {
            "model": tiny,
            "sampling": {"max_new_tokens": NEW},
            "speculation": {"method": "auto", "draft_model": tiny_draft},
            "runner_args": {"batch_size": 3},
        }
    )
    runner = huggingface.Runner(config)
    runner.check()
    with runner:
        runner.warm_up()
        requests = list(requests_for(runner.tokenizer, to_sampling(config.sampling)))
        outcomes = list(runner.generate(requests))
        assert len(outcomes) == len(requests)
        assert "context+draft_model" in runner.about()["trial"], "it had turns, whatever came of them"
        assert all(plain(3, 3, 9) == before for plain, before in expected), "it learns from no steps that draft"
        assert any("context+draft_model" in note for note in runner.notes)


@pytest.mark.parametrize("least", [*wide(0.0), 0.36])
def test_how_long_a_sampled_draft_is_does_not_bend_the_distribution(loaded, tiny, monkeypatch, least):  # noqa: F811
    """Pairs of tokens against their exact probabilities, with a cost that would drop what the draft found unlikely.

    To drop a token that was drawn because it was unlikely, and to draw another from the target, makes likely ones
    likelier.
    """
    from transformers import AutoModelForCausalLM

    draws, unlikely = 3000, []

    def allocate(acceptances, cost, reach, prefill_tokens):
        unlikely.extend(1 for chain in acceptances if chain and chain[0] < least)
        return [sum(value >= least for value in chain) for chain in acceptances]

    monkeypatch.setattr(proposers, "allocate", allocate)
    monkeypatch.setattr(Confidence, "chance", lambda self, sure: sure)
    monkeypatch.setattr(DraftLength, "chosen", lambda self, missing, left, reach: list(range(len(missing))))
    inner = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    rules = GenerationRules(inner, frozenset(), 0)
    prompt = loaded(tiny)[1].encode("Why is the sky blue?", special_tokens=True)
    sampling = {"max_new_tokens": 3, "temperature": 2.0, "top_k": 3}
    asked = (Request(i, f"r{i}", prompt, Sampling(seed=i, **sampling)) for i in range(draws))
    draft = prepare(_nearly(tiny))
    draft.resize(64)
    cost = StepCost([(1, 0.1), (512, 0.1)])
    settings = {"processors": lambda request: rules.processors(request.sampling, len(prompt))}
    proposer = DraftModel(draft, 400, None, None, cost)
    outcomes = answers(loaded, tiny, proposer, 64, asked, cost=cost, **settings)
    assert sum(outcome.spec.drafted for outcome in outcomes.values()) > draws
    assert bool(unlikely) == (least > 0)
    expected = _pairs(inner, prompt, sampling["temperature"], sampling["top_k"])
    seen = dict.fromkeys(expected, 0)
    for outcome in outcomes.values():
        seen[tuple(outcome.token_ids[:2])] += 1
    chi = sum((seen[pair] - draws * chance) ** 2 / (draws * chance) for pair, chance in expected.items())
    assert chi < 27.9, (seen, expected)  # 8 degrees of freedom: one in two thousand


@torch.no_grad()
def _nearly(folder):
    """Return a model that is much like the one in `folder`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    for weight in model.parameters():
        weight += 0.15 * weight.std() * torch.randn_like(weight)
    return model


@torch.inference_mode()
def _pairs(model, prompt, temperature, top_k):
    """Return the probability of each pair of first tokens."""
    pairs = {}
    for first, chance in _likeliest(model, prompt, temperature, top_k):
        for second, then in _likeliest(model, [*prompt, first], temperature, top_k):
            pairs[first, second] = chance * then
    return pairs


def _likeliest(model, text, temperature, top_k):
    best = model(torch.tensor([text])).logits[0, -1].double().topk(top_k)
    return list(zip(best.indices.tolist(), torch.softmax(best.values / temperature, -1).tolist(), strict=True))


def test_the_trial_is_told_what_came_of_asking_beside_prompts(loaded, tiny, plain):  # noqa: F811
    class Noted(MethodSelector):
        def __init__(self):
            super().__init__(["fixed"])
            self.beside = []

        def observe_beside(self, rows, accepted, seconds, expected_s, asking_s):
            assert 0 < asking_s < seconds
            self.beside.append((rows, accepted))
            super().observe_beside(rows, accepted, seconds, expected_s, asking_s)

    trial, drafts = Noted(), RowProposer(Fixed(oracle(plain, loaded, tiny)), 3, None)
    outcomes = answers(loaded, tiny, drafts, rows=2, chunk=8, trial=trial)
    assert ids(outcomes) == plain
    assert {rows for rows, _ in trial.beside} == {1}, "one of the two was computing its prompt"
    assert {accepted for _, accepted in trial.beside} <= {0, 1, 2, 3}
    accepted = sum(accepted for _, accepted in trial.beside)
    assert 0 < accepted <= sum(outcome.spec.accepted for outcome in outcomes.values())


def test_a_step_whose_drafts_were_made_and_thrown_away_is_no_plain_one(loaded, tiny, tiny_draft):  # noqa: F811
    class Noted(MethodSelector):
        def __init__(self):
            super().__init__(["draft_model"])
            self.steps, self.asking = [], []

        def observe(self, rows, drafted, tokens, seconds, expected_s, asking_s=0.0):
            self.steps.append(drafted)
            self.asking.append(0 < asking_s < seconds)
            super().observe(rows, drafted, tokens, seconds, expected_s, asking_s)

    class Useless(DraftModel):
        def _draft(self, sketch):
            super()._draft(sketch)
            sketch.guesses = []
            return Draft()

    inner = loaded(tiny_draft)[0]
    inner.resize(4)
    trial = Noted()
    outcomes = answers(loaded, tiny, Useless(inner, 400, None, 3, None), trial=trial)
    assert sum(outcome.spec.drafted for outcome in outcomes.values()) == 0
    found = trial.about()["guard"]
    assert trial.steps.count(0) <= found["plain_steps"] + found["paused_steps"] < len(trial.steps)
    assert all(asking for asking, drafted in zip(trial.asking, trial.steps, strict=True) if drafted)
    assert not all(trial.asking), "nobody is asked in a plain step"
