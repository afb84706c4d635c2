"""Where a model changes what it does by the length of a text: limits found, lowered, crossed; frequencies by row."""

import copy
from contextlib import nullcontext

import pytest
import torch
import transformers

from ragspec.engine import attention, prepared, selfcheck
from ragspec.engine.decode import Engine, EngineSettings
from ragspec.engine.forward import Model
from ragspec.engine.proposers import ByRow
from ragspec.models import limits
from ragspec.models.limits import Limit, limits_of, lowered
from ragspec.models.mending import mend
from ragspec.models.rotary import effective_length, length_dependent
from ragspec.records import Request, Sampling
from ragspec.speculation.drafters.context import ContextDrafter
from tests.conftest import wide
from tests.engine.test_engine_models import SMALL

TINY = {
    **SMALL,
    "vocab_size": 400,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 8.0]}
ORIGINAL = 24
NEW = 20


def build(kind, **settings):
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **settings})
    return mend(transformers.AutoModelForCausalLM.from_config(config).eval())


def phi3(original=ORIGINAL):
    scaling = {**LONGROPE, "type": "longrope"}
    return build("Phi3", rope_scaling=scaling, original_max_position_embeddings=original, sliding_window=None)


def longrope_llama():
    return build("Llama", rope_parameters={**LONGROPE, "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL})


def dynamic_llama():
    parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return build("Llama", rope_parameters=parameters, max_position_embeddings=ORIGINAL)


def stock_answer(model, token_ids):
    """Return what generate() writes for a record alone, the model as if it had never seen another."""
    out = copy.deepcopy(model).generate(
        torch.tensor([token_ids]), do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(token_ids) :].tolist()


def prompts():
    """Short and long ones, one that ends just below the original length, and some that share what others begin with."""
    text = torch.randint(1, 400, (3, 90), generator=torch.Generator().manual_seed(5)).tolist()
    yield from (text[0][:n] for n in (5, 17, 23, 24, 25, 60))
    yield from ([*text[0][:16], *text[1][:n]] for n in (3, 9, 50))
    yield from ([*text[2][:40], *text[1][: n + 1]] for n in (2, 30))


@pytest.mark.parametrize("make", [phi3, longrope_llama, dynamic_llama])
@pytest.mark.parametrize(("rows", "chunk"), [*wide((1, 512)), (3, 8), *wide((4, 32))])
def test_frequencies_that_depend_on_length_are_those_of_a_record_alone(make, rows, chunk):
    model = make()
    expected = {i: stock_answer(model, ids) for i, ids in enumerate(prompts())}
    assert len({tuple(answer) for answer in expected.values()}) > 5
    engine_model = prepared.prepare(copy.deepcopy(model))
    engine_model.resize(rows)
    requests = [Request(i, f"r{i}", ids, Sampling(max_new_tokens=NEW)) for i, ids in enumerate(prompts())]
    engine = Engine(engine_model, ByRow(ContextDrafter(), 4, None), None, frozenset(), EngineSettings(chunk=chunk))
    outcomes = {outcome.index: outcome for outcome in engine.run(requests)}
    assert {i: outcome.token_ids for i, outcome in sorted(outcomes.items())} == expected
    assert sum(outcome.cached_prompt_tokens for outcome in outcomes.values()) > 0  # what agrees is still shared


@pytest.mark.parametrize("make", [phi3, longrope_llama, dynamic_llama])
def test_packed_rows_without_frequencies_of_their_own_answer_otherwise(make, monkeypatch):
    """The defect that frequencies.py mends, planted again: one long row changes its neighbours."""
    model = make()
    requests = [Request(i, f"r{i}", ids, Sampling(max_new_tokens=NEW)) for i, ids in enumerate(prompts())]
    expected = {i: stock_answer(model, ids) for i, ids in enumerate(prompts())}
    engine_model = Model(copy.deepcopy(model), 4)
    for module in length_dependent(engine_model.inner):
        del module.forward
    engine = Engine(engine_model, ByRow(ContextDrafter(), 4, None), None, frozenset())
    assert {outcome.index: outcome.token_ids for outcome in engine.run(requests)} != expected
    monkeypatch.setattr("ragspec.engine.frequencies.length_dependent", lambda inner: [])
    with pytest.raises(prepared.Refused, match="different logits"):
        prepared.prepare(copy.deepcopy(model))


def test_a_record_that_outgrows_its_short_frequencies_is_computed_anew_where_the_model_does_so():
    assert Model(phi3(), 1).frequencies.restart == ORIGINAL
    assert Model(longrope_llama(), 1).frequencies.restart is None
    assert Model(dynamic_llama(), 1).frequencies.restart is None
    assert Model(build("Llama"), 1).frequencies.restart is None


@pytest.mark.parametrize(
    ("make", "base", "other", "tokens", "agree"),
    [
        (longrope_llama, 20, 23, 19, True),
        (longrope_llama, 20, 60, 19, False),
        (longrope_llama, 40, 60, 39, True),
        (longrope_llama, 40, 10, 39, False),  # the other began short: its first tokens have short frequencies
        (dynamic_llama, 40, 60, 39, False),
        (dynamic_llama, 60, 60, 59, True),
        (dynamic_llama, 20, 10, 19, True),
    ],
)
def test_only_what_has_the_same_frequencies_is_shared(make, base, other, tokens, agree):
    assert Model(make(), 1).frequencies.agree(base, other, tokens) is agree


@pytest.mark.parametrize("length", [1, 23, 24, 25, 26, 100])
def test_the_effective_length_of_a_text(length):
    assert effective_length(length, "longrope", 24) == (24 if length <= 24 else 25)
    assert effective_length(length, "dynamic", 24) == max(24, length)


# -- limits -----------------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (lambda: build("Llama"), []),
        (lambda: build("Mistral", sliding_window=400), [Limit("sliding_window", 400)]),
        (lambda: build("Mistral", sliding_window=512), []),  # no text is that long
        (lambda: build("Mistral", sliding_window=None), []),
        (lambda: build("Qwen2", sliding_window=100, use_sliding_window=False), []),
        (lambda: phi3(100), [Limit("original_max_position_embeddings", 100)]),
        (lambda: dynamic_llama(), [Limit("max_position_embeddings", ORIGINAL)]),
    ],
)
def test_limits_are_found_in_the_config(model, found):
    assert limits_of(model()) == found


@pytest.mark.parametrize("make", [lambda: build("Mistral", sliding_window=400), lambda: phi3(100), dynamic_llama])
def test_a_lowered_limit_changes_the_logits_and_is_raised_again(make):
    inner = make()
    model = Model(inner, 2)
    ids = selfcheck.token_ids(inner, 20)  # below all of them
    before = selfcheck.reference(model, ids)
    (limit,) = limits_of(inner)
    with lowered(inner, limit):
        assert not torch.allclose(selfcheck.reference(model, ids), before, atol=1e-3)
    assert torch.equal(selfcheck.reference(model, ids), before)
    assert limits_of(inner) == [limit]


@pytest.mark.parametrize("original", [24, 100])
def test_a_limit_used_at_building_only_is_no_reason_to_refuse(original):
    prepared.prepare(build("Llama", rope_parameters={**YARN, "original_max_position_embeddings": original}))
    three = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    prepared.prepare(build("Llama", rope_parameters={**three, "original_max_position_embeddings": original}))


def test_a_limit_that_cannot_be_lowered_is_crossed_in_full(monkeypatch):
    """A model that keeps its window where nobody finds it."""
    monkeypatch.setattr(selfcheck, "lowered", lambda inner, limit: nullcontext())
    prepared.prepare(build("Mistral", sliding_window=100))
    right = attention.attend
    monkeypatch.setattr(attention, "attend", lambda module, q, k, v, mask, **rest: right(module, q, k, v, None, **rest))
    with pytest.raises(prepared.Refused, match="beyond its sliding_window of 100"):
        prepared.prepare(build("Mistral", sliding_window=100))
    monkeypatch.setattr(selfcheck, "PATIENCE_S", 0.0)
    monkeypatch.setattr(attention, "attend", right)
    with pytest.raises(prepared.Refused, match="sliding_window of 100 that a short check cannot cross"):
        prepared.prepare(build("Mistral", sliding_window=100))


@pytest.mark.parametrize("window", [10, 47, 48, 49, 400])
def test_windows_of_any_size_are_those_of_stock_generate(window):
    model = build("Mistral", sliding_window=window)
    expected = {i: stock_answer(model, ids) for i, ids in enumerate(prompts())}
    engine_model = prepared.prepare(copy.deepcopy(model))
    engine_model.resize(3)
    requests = [Request(i, f"r{i}", ids, Sampling(max_new_tokens=NEW)) for i, ids in enumerate(prompts())]
    engine = Engine(engine_model, ByRow(ContextDrafter(), 4, None), None, frozenset(), EngineSettings(chunk=16))
    assert {outcome.index: outcome.token_ids for outcome in engine.run(requests)} == expected


def test_a_model_that_is_refused_is_left_as_it_was():
    for make in (phi3, lambda: build("Mistral", sliding_window=100)):
        inner = make()
        names = [name for name, _ in inner.named_modules()]
        before = stock_answer(inner, [5] * 30)
        model = Model(inner, 2)
        model.release()
        assert [name for name, _ in inner.named_modules()] == names
        assert inner.config._attn_implementation == "sdpa"
        assert stock_answer(inner, [5] * 30) == before
        assert limits.limits_of(inner)
