"""The first layers draft: no answer changes, and nothing that they computed is computed again."""

import pytest
import torch

from ragspec.engine import decode, prepared
from ragspec.engine.compiled import CompiledLayers
from ragspec.engine.early_exit import EarlyExit
from ragspec.engine.halves import Halves
from ragspec.engine.proposers import NoDrafts
from ragspec.engine.room import Room
from ragspec.models.rounding import tolerance
from ragspec.models.tokenizer import HFTokenizer
from ragspec.records import Sampling
from ragspec.speculation.cost import StepCost
from tests.conftest import train_tokenizer, wide
from tests.engine.test_compiled import interpreted
from tests.engine.test_engine import NEW, answers, ids, loaded, requests_for  # noqa: F401
from tests.engine.test_engine_models import FAMILIES, build
from tests.engine.test_engine_models import requests_for as requests_of


@pytest.fixture(scope="module")
def words(sample_texts):
    return HFTokenizer(train_tokenizer(400, sample_texts))


@pytest.fixture
def halves(loaded, tiny):  # noqa: F811
    model = loaded(tiny)[0]
    yield Halves(model, 1)
    model.halves = None


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, *wide(4), 16])
@pytest.mark.parametrize("num_tokens", [*wide(1, 5), None])
def test_early_exit_changes_no_greedy_answer(loaded, tiny, halves, rows, sampling, num_tokens):  # noqa: F811
    model, tokenizer = loaded(tiny)
    requests = list(requests_for(tokenizer, Sampling(max_new_tokens=NEW, **sampling)))
    expected = ids(answers(loaded, tiny, rows=rows, requests=iter(requests)))
    cost = None if num_tokens else StepCost([(1, 0.1), (256, 0.2)])
    used = EarlyExit(model, halves, 400, num_tokens, cost)
    outcomes = answers(loaded, tiny, used, rows, requests=iter(requests), chunk=64)
    if not sampling:  # sampled drafts keep the distribution, not the tokens
        assert ids(outcomes) == expected
    assert sum(outcome.spec.drafted for outcome in outcomes.values()) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_same_in_halves(family, words):
    model = prepared.prepare(build(family, words))
    for layers in range(1, len(model.layers)):
        assert Halves(model, layers).check() <= tolerance(torch.float32)
    expected = ids(_outcomes(model, words, NoDrafts(), 1))
    used = EarlyExit(model, Halves(model, 1), 400, 3, None)
    outcomes = _outcomes(model, words, used, 3)
    assert ids(outcomes) == expected
    assert sum(outcome.spec.drafted for outcome in outcomes.values()) > 0


def _outcomes(model, words, proposer, rows):
    model.resize(rows)
    engine = decode.Engine(model, proposer, words, frozenset(), decode.EngineSettings(chunk=32))
    return {outcome.index: outcome for outcome in engine.run(requests_of(words))}


def test_compiled_layers_run_in_halves(words):
    model = prepared.prepare(build("llama-heads-of-16", words))
    expected = ids(_outcomes(model, words, NoDrafts(), 1))
    CompiledLayers(model, interpreted, least=2).on()
    halves = Halves(model, 2)
    assert halves.check() <= tolerance(torch.float32)
    assert ids(_outcomes(model, words, EarlyExit(model, halves, 400, 4, None), 3)) == expected


def test_every_layer_computes_a_token_once(words):
    """Of a model whose other layers change nothing all drafts are right: each layer sees each token once."""
    inner = build("llama", words)
    for layer in inner.model.layers[1:]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    model = prepared.prepare(inner)
    halves, seen = Halves(model, 1), [0, 0, 0]

    def counting(number):
        def count(module, args, kwargs):
            seen[number] += (args[0] if args else kwargs["hidden_states"]).shape[1]

        return count

    for number, layer in enumerate(inner.model.layers):
        layer.register_forward_pre_hook(counting(number), with_kwargs=True)
    outcomes = _outcomes(model, words, EarlyExit(model, halves, 400, 4, None), 3)
    assert all(one.spec.accepted == one.spec.drafted > 0 for one in outcomes.values())
    prompts = sum(len(request.token_ids) for request in requests_of(words))
    written = sum(len(one.token_ids) - 1 for one in outcomes.values())  # the last is never an input
    assert seen[0] == seen[1] == seen[2]
    assert seen[0] <= prompts + written


def test_a_stale_half_is_caught(loaded, tiny, halves, monkeypatch):  # noqa: F811
    """What was begun with other tokens must not be gone on with."""
    model = loaded(tiny)[0]

    def careless(self, segment, ids):
        begun = self._begun.pop(segment.row, None)
        return self._hidden[:0] if begun is None else begun.hidden[: segment.count].flip(0)

    monkeypatch.setattr(Halves, "_known", careless)
    assert not halves.check() <= tolerance(torch.float32)
    assert model.halves is halves


def test_drafts_never_make_the_cache_grow(loaded, tiny, halves):  # noqa: F811
    """How far it grows is the engine's to decide, within the memory there is."""
    model, tokenizer = loaded(tiny)
    requests = list(requests_for(tokenizer, Sampling(max_new_tokens=90), count=3))
    expected = ids(answers(loaded, tiny, rows=3, requests=iter(requests)))
    grown = []

    class Watched(EarlyExit):
        def drafts(self, rows, asked):
            self._num_tokens = 1 + 7 * (len(grown) % 2)  # so that drafts go beyond what the step before needed
            before = model.cache.slots
            drafts = super().drafts(rows, asked)
            grown.append(model.cache.slots - before)
            return drafts

    class Tight(Room):
        def ahead(self, slots, *known):
            return slots

    used = Watched(model, halves, 400, 4, None)
    outcomes = answers(loaded, tiny, used, 3, requests=iter(requests), room=Tight())
    assert ids(outcomes) == expected
    assert sum(outcome.spec.drafted for outcome in outcomes.values()) > 0
    assert len(grown) > 10
    assert set(grown) == {0}
