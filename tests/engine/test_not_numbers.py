"""A record for which the model overflows (its logits are NaN) fails in one line, and changes no other answer."""

import random
from dataclasses import replace

import pytest
import torch

from ragspec.engine.backends.graphs import emulated
from ragspec.engine.backends.paged_attention import gathered
from ragspec.engine.engine import Engine, EngineSettings
from ragspec.engine.kv.cache import RaggedCache
from ragspec.engine.kv.paged_cache import PagedCache
from ragspec.engine.model import loaded
from ragspec.engine.model.forward import Model
from ragspec.engine.proposers.base import NoProposer, RowProposer
from ragspec.models.draft import Draft
from ragspec.models.logits_processors import GenerationRules
from ragspec.models.tokenizer import HFTokenizer
from ragspec.records import Failure, Sampling
from ragspec.runners.huggingface.assisted import Speculation
from ragspec.runners.huggingface.stock import StockBackend
from ragspec.speculation.drafters import base
from ragspec.speculation.drafters.context import ContextDrafter
from ragspec.structured.grammars import Grammars
from tests.devices import place, several_gpus
from tests.engine.test_devices import engine
from tests.engine.test_engine_models import build
from tests.engine.test_paged import requests_for
from tests.engine.test_short_pool import EOS, SAMPLINGS, mixed
from tests.queued import Queue

OVERFLOWS = 399  # a token that is in no other prompt


def spoilt_at(inner, token):
    """Let a model overflow with a token."""
    with torch.no_grad():
        inner.get_input_embeddings().weight[token] = float("nan")
    return inner


def overflowing(folder, attention):
    from transformers import AutoModelForCausalLM

    inner = spoilt_at(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), OVERFLOWS)
    return (
        Model(inner, 4, None, gathered, emulated)
        if attention == "gathered"
        else loaded.prepare(inner, native=attention == "cpu")
    )


def with_overflows(requests):
    """Return the requests, a third of which overflow, and the indices of the others."""
    rng, found, sound = random.Random(5), [], []
    for number, request in enumerate(requests):
        ids = list(request.token_ids)
        if number % 3 == 1:
            ids[rng.randrange(len(ids))] = OVERFLOWS
        else:
            sound.append(number)
        found.append(replace(request, token_ids=ids))
    return found, sound


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return HFTokenizer(AutoTokenizer.from_pretrained(tiny))


def answered(model, tokenizer, requests, proposer):
    """Return the outcome of each request, by its index, on three rows."""
    model.resize(3)
    grammars, rules = Grammars(tokenizer.inner, 400, {EOS}), GenerationRules(model.inner, frozenset([EOS]), EOS)
    settings = EngineSettings(
        chunk=48,
        processors=lambda request: rules.processors(request.sampling, len(request.token_ids)),
        grammars=lambda: grammars,
    )
    outcomes = Engine(model, proposer, tokenizer, frozenset([EOS]), settings).run(iter(requests))
    return {one.index: one for one in outcomes}


def outcome(one):
    return one.message if isinstance(one, Failure) else (one.token_ids, one.finish_reason)


@pytest.mark.parametrize("method", ["none", "context"])
@pytest.mark.parametrize("attention", ["cpu", "sdpa", "gathered"])
def test_a_record_that_overflows_fails_alone(tiny, tokenizer, attention, method):
    """Greedy, sampled, with penalties, log-probabilities, grammars, and shared prefixes; memory is used again."""

    def run(requests):
        proposer = RowProposer(ContextDrafter(), 4, None) if method == "context" else NoProposer()
        return answered(overflowing(tiny, attention), tokenizer, requests, proposer)

    requests, sound = with_overflows(mixed(1, SAMPLINGS, 21))
    found, alone = run(requests), run([requests[number] for number in sound])
    for number in range(len(requests)):
        if number in sound:
            assert outcome(found[number]) == outcome(alone[number])
        else:
            assert "logits are not numbers (NaN)" in found[number].message


def test_it_fails_where_steps_are_started_ahead(words, monkeypatch):
    monkeypatch.setattr(loaded, "flex", lambda compiled, notes, exact: gathered)
    width, sampling = len(words.inner), Sampling(max_new_tokens=12)

    def run(requests, moved):
        backend = engine(moved(spoilt_at(build("llama", words), width - 1)), words, compile="off")
        return {one.index: outcome(one) for one in backend.generate(requests)}

    plain = list(requests_for(words, sampling))
    requests = [
        replace(one, token_ids=[*one.token_ids[:-1], width - 1]) if one.index % 3 == 1 else one for one in plain
    ]
    expected = run([one for one in requests if one.index % 3 != 1], lambda inner: inner)
    with several_gpus(16 << 20, Queue()):
        found = run(requests, lambda inner: place(inner, "cuda:0"))
    assert {index: one for index, one in found.items() if index % 3 != 1} == expected
    assert all("NaN" in one for index, one in found.items() if index % 3 == 1)


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_it_fails_beside_a_draft_model_that_overflows_too(words, temperature):
    plain = list(requests_for(words, Sampling(max_new_tokens=12, temperature=temperature, seed=3)))
    token = next(at for at in range(299, 0, -1) if all(at not in one.token_ids for one in plain))
    models = [spoilt_at(build("llama", words), token) for _ in range(2)]
    spoilt = {one.index for one in plain if one.index % 3 == 1}
    requests = [replace(one, token_ids=[*one.token_ids[:-1], token]) if one.index in spoilt else one for one in plain]
    backend = engine(models[0], words, "draft_model", models[1])
    found = {one.index: one for one in backend.generate(requests)}
    assert {index for index, one in found.items() if isinstance(one, Failure)} == spoilt
    assert sum(one.spec.accepted for index, one in found.items() if index not in spoilt) > 0


def test_stock_generate_fails_for_it_alone(words):
    inner = spoilt_at(build("llama", words), -1)
    plain = list(requests_for(words, Sampling(max_new_tokens=6)))[:4]
    spoilt = replace(plain[1], token_ids=[*plain[1].token_ids, len(words.inner) - 1])
    ends, rules = frozenset([0]), GenerationRules(inner, frozenset([0]), 0)
    backend = StockBackend(inner, words, ends, Speculation("none"), rows=4, rules=rules, greedy_by_default=True)
    expected = [outcome(one) for one in backend.generate(iter([*plain[:1], *plain[2:]]))]
    found = [outcome(one) for one in backend.generate(iter([plain[0], spoilt, *plain[2:]]))]
    assert [found[0], *found[2:]] == expected
    assert "NaN" in found[1]


@pytest.mark.parametrize("kind", [PagedCache, RaggedCache])
def test_a_row_is_erased_but_for_what_others_use(kind):
    cache = kind(2)
    cache.resize(2, 256)
    if kind is PagedCache:
        cache.layer(*[torch.ones(1, 1, 1, 2)] * 2)
    cache.fill(0, 0, [torch.ones(1, 256, 2)] * 2)
    assert cache.share_prefix(0, 1, 128) == 128
    cache.erase(0)
    assert all(each.eq(1).all() for each in cache.read(1, 0, 128))
    assert all(each.eq(0).all() for each in cache.read(0, 128, 256))


class DraftsThatOverflow(NoProposer):
    """Guesses the token that overflows, in some steps."""

    def __init__(self):
        self._steps = 0

    def propose(self, rows, prefill_tokens):
        self._steps += 1
        return [base.Draft([7, OVERFLOWS, 9][: row.room - 1] if (self._steps + row.place) % 3 else []) for row in rows]


@pytest.mark.parametrize("attention", ["cpu", "sdpa", "gathered"])
def test_a_wrong_draft_that_overflows_changes_no_answer(tiny, tokenizer, attention):
    def run(proposer):
        found = answered(overflowing(tiny, attention), tokenizer, mixed(1, SAMPLINGS, 21), proposer)
        return {index: outcome(one) for index, one in found.items()}

    assert run(DraftsThatOverflow()) == run(NoProposer())


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_stock_generate_answers_without_a_draft_that_overflows(words, temperature):
    requests = list(requests_for(words, Sampling(max_new_tokens=6, temperature=temperature)))[:3]
    token = next(at for at in range(299, 0, -1) if all(at not in one.token_ids for one in requests))
    inner, draft_model = spoilt_at(build("llama", words), token), build("llama", words)
    draft_model.lm_head.register_forward_hook(
        lambda module, inputs, logits: logits.index_fill(-1, torch.tensor(token), 9)
    )
    draft = Draft(None, draft_model.config, words.inner, None, len(words.inner), other_tokens=False)
    ends, rules = frozenset([0]), GenerationRules(inner, frozenset([0]), 0)

    def answers(speculation):
        backend = StockBackend(inner, words, ends, speculation, rows=1, rules=rules, greedy_by_default=True)
        return list(backend.generate(iter(requests)))

    found = answers(Speculation("draft_model", 2, draft=draft, draft_model=draft_model))
    assert [outcome(one) for one in found] == [outcome(one) for one in answers(Speculation("none"))]
    assert all("NaN" in one.undrafted for one in found)
