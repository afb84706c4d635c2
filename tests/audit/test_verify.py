"""What is emitted is distributed as the target says, whatever was drafted; noise and weights are what they claim."""

import inspect
import math
from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.engine import sampling as verify
from ragspec.engine.sampling import Noise, SampledDraft, agreement, draw
from ragspec.records import Sampling
from tests import chances
from tests.chances import penalise, probabilities

BELOW_ONE = math.nextafter(1.0, 0.0)
DRAWS = 2000
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 9: 27.88, 26: 54.05}  # chi-square, 1 in 1000

PAIRS = {  # (target, draft) over six tokens
    "crossing": ([0.05, 0.10, 0.15, 0.30, 0.25, 0.15], [0.30, 0.25, 0.20, 0.10, 0.05, 0.10]),
    "sharper draft": ([0.30, 0.20, 0.20, 0.10, 0.10, 0.10], [0.90, 0.02, 0.02, 0.02, 0.02, 0.02]),
    "flatter draft": ([0.80, 0.04, 0.04, 0.04, 0.04, 0.04], [1 / 6] * 6),
    "equal": ([0.40, 0.20, 0.15, 0.10, 0.10, 0.05], [0.40, 0.20, 0.15, 0.10, 0.10, 0.05]),
    "disjoint supports": ([0.5, 0.3, 0.2, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.2, 0.3, 0.5]),
    "supports that overlap": ([0.4, 0.3, 0.2, 0.1, 0.0, 0.0], [0.0, 0.0, 0.1, 0.5, 0.2, 0.2]),
    "one-hot draft": ([0.30, 0.30, 0.20, 0.10, 0.05, 0.05], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
    "one-hot draft beside the target": ([0.0, 0.4, 0.3, 0.1, 0.1, 0.1], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
    "one-hot target": ([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.4, 0.1, 0.1, 0.1]),
}


def one_by_one(rule):
    """Return `rule` for one draft."""
    return lambda target, drafted, draft, noise, position: rule(
        [SampledDraft(target, drafted, draft, noise, position)]
    )[0]


reject = one_by_one(verify.reject)


def excess(tokens, expected):
    """Return chi-square over its critical value: over 1, `tokens` were not drawn from `expected`."""
    counts, total = Counter(tokens), len(tokens)
    support = [token for token, p in enumerate(expected) if p > 0]
    if set(counts) - set(support):
        return math.inf
    if len(support) == 1 or total < 200:
        return 0.0
    chi = sum((counts[token] - total * expected[token]) ** 2 / (total * expected[token]) for token in support)
    return chi / CRITICAL[len(support) - 1]


def emissions(rule, target, drafted, draws=DRAWS):
    """Return what `rule` emits for drafts that are drawn, as a draft model draws them, from `drafted`."""
    positions = [n % 40 for n in range(draws)]
    noises = [Noise(0, f"r{n}") for n in range(draws)]
    drafts = []
    for i, row in enumerate(drafted):
        uniforms = [noise.at(position + i, b"draft") for noise, position in zip(noises, positions, strict=True)]
        drafts.append(draw(row.expand(draws, -1), uniforms))
    chains = zip(noises, positions, zip(*drafts, strict=True), strict=True)
    return [rule(target, drafted, draft, noise, position) for noise, position, draft in chains]


def two_deep(pair):
    """Return (3, 6) and (2, 6) probabilities: the pair, turned by one token per position."""
    target, drafted = (torch.tensor(one, dtype=torch.float64) for one in PAIRS[pair])
    return torch.stack([target.roll(i) for i in range(3)]), torch.stack([drafted.roll(i) for i in range(2)])


def worst(rule, pair, draws=DRAWS):
    """Return the largest excess of the first, second and third token; the latter two where the forerunners passed."""
    target, drafted = two_deep(pair)
    emitted = emissions(rule, target, drafted, draws)
    assert all(1 <= len(tokens) <= 3 for tokens in emitted)
    return max(excess([t[i] for t in emitted if len(t) > i], target[i].tolist()) for i in range(3))


@pytest.mark.parametrize("pair", PAIRS)
def test_sampled_drafts_never_change_the_distribution(pair):
    assert worst(reject, pair) < 1


@pytest.mark.parametrize("pair", PAIRS)
def test_no_more_drafts_are_rejected_than_must_be(pair):
    target, drafted = two_deep(pair)
    emitted = emissions(reject, target, drafted, 1000)
    overlap = float(torch.minimum(target[0], drafted[0]).sum())
    passed = sum(len(tokens) > 1 for tokens in emitted) / len(emitted)
    assert abs(passed - overlap) <= 4 * math.sqrt(overlap * (1 - overlap) / len(emitted)) + 1e-9


BIASES = {
    "believes every draft": ('noise.at(position + i, b"accept") * q < p', "True"),
    "believes no draft": ('noise.at(position + i, b"accept") * q < p', "False"),
    "believes the likelier ones only": ('noise.at(position + i, b"accept") * q < p', "q <= p"),
    "accepts upside down": ("* q < p", "* p < q"),
    "accepts by the target alone": ("* q < p", "< p"),
    "replaces from the whole target": ("(target - drafted).clamp_(min=0)", "target.clone()"),
    "replaces from what the draft liked": ("(target - drafted)", "(drafted - target)"),
    "replaces from the difference's size": (".clamp_(min=0)", ".abs_()"),
    "replaces from the last position": ("_left(draft.target[end]", "_left(draft.target[-1]"),
    "judges by the first position": ("draft.target[:-1].gather", "draft.target[:1].expand(len(each), -1).gather"),
    "goes on from the last draft's place": ("draft.target[last]", "draft.target[last - 1]"),
    "judges with the draft's own noise": ('b"accept"', 'b"draft"'),
    "judges all with one number": ('position + i, b"accept"', 'position, b"accept"'),
    "replaces with the number that rejected": ('b"residual"', 'b"accept"'),
    "replaces with the draft's own noise": ('b"residual"', 'b"draft"'),
}


@pytest.mark.parametrize("bias", BIASES)
def test_a_biased_accept_rule_is_caught(bias):
    right, wrong = BIASES[bias]
    source = inspect.getsource(verify)
    assert source.count(right) == 1
    scope = {"__name__": verify.__name__}
    exec(source.replace(right, wrong), scope)
    assert worst(one_by_one(scope["reject"]), "crossing", 1500) > 2


def chain(seed):
    """Return (3,), (3, 3) and (3, 3, 3) probabilities: of a token, given those before it."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.rand((3,) * depth, generator=generator, dtype=torch.float64) + 0.1 for depth in (1, 2, 3)]
    return [row / row.sum(-1, keepdim=True) for row in rows]


def answer(target, drafting, noise, most):
    """Write three tokens in steps of the engine; drafts are `most` tokens of a model that sees what is written."""
    written = []
    while len(written) < 3:
        guesses, weights = [], []
        for _ in range(min(most, 2 - len(written))):
            seen = (*written, *guesses)
            weights.append(drafting[len(seen)][seen])
            guesses += draw(weights[-1][None], [noise.at(len(seen), b"draft")])
        seen = (*written, *guesses)
        heard = torch.stack([target[i][seen[:i]] for i in range(len(written), len(seen) + 1)])
        drafted = torch.stack(weights) if weights else heard[:0]
        written += reject(heard, drafted, guesses, noise, len(written))
    return tuple(written)


@pytest.mark.parametrize("most", [1, 2])
def test_answers_written_over_several_steps_are_the_targets(most):
    """Noise of a place that a rejected draft used once is used again by the next one: that must not show."""
    target, drafting = chain(1), chain(2)
    places = list(product(range(3), repeat=3))
    expected = [float(target[0][a] * target[1][a, b] * target[2][a, b, c]) for a, b, c in places]
    answers = [places.index(answer(target, drafting, Noise(3, f"r{n}"), most)) for n in range(DRAWS)]
    assert excess(answers, expected) < 1
    assert excess(answers, [float(drafting[0][a] * target[1][a, b] * target[2][a, b, c]) for a, b, c in places]) > 1


def test_a_draft_of_nothing_is_a_plain_sample():
    target = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    for n in range(50):
        noise = Noise(1, f"r{n}")
        assert reject(target, target[:0], [], noise, 7) == draw(target, [noise.at(7)])


def test_a_rejected_token_that_leaves_nothing_is_drawn_anew():
    """Rounding may make a target that is the draft smaller everywhere: no weight is left for the replacement."""
    drafted = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    target = torch.cat([drafted * 0.5] * 2)
    emitted = [reject(target, drafted, [0], Noise(0, f"r{n}"), 0) for n in range(200)]
    assert {tokens[0] for tokens in emitted} == {0, 1}
    assert {len(tokens) for tokens in emitted} == {1, 2}


def test_drafts_that_are_judged_together_are_judged_as_each_alone():
    """Of different lengths, one of them empty."""
    target, drafted = two_deep("crossing")
    for n in range(50):
        several = [
            SampledDraft(target[: k + 1], drafted[:k], [(n + k) % 6] * k, Noise(n, f"r{k}"), 3 * k)
            for k in (2, 0, 1, 2)
        ]
        assert verify.reject(several) == [verify.reject([one])[0] for one in several]


def test_the_probabilities_are_left_as_they_were():
    target, drafted = two_deep("crossing")
    before = target.clone(), drafted.clone()
    emissions(reject, target, drafted, 50)
    assert torch.equal(target, before[0])
    assert torch.equal(drafted, before[1])


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_agreement_is_the_longest_common_beginning(draft, chosen):
    chosen = chosen[: len(draft) + 1]
    kept = agreement(draft, chosen)
    assert draft[:kept] == chosen[:kept]
    assert kept == len(draft) or draft[kept] != chosen[kept]
    assert len(chosen[: kept + 1]) == kept + 1


# -- draw -------------------------------------------------------------------------------------------------------------

WEIGHTS = st.lists(st.sampled_from([0.0, 0.0, 1e-12, 0.1, 0.25, 1.0, 7.3, 1e6]), min_size=1, max_size=12).filter(any)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
UNIFORMS = st.one_of(st.sampled_from([0.0, 0.5, BELOW_ONE]), st.floats(0, 1, exclude_max=True))


@DTYPES
@given(weights=WEIGHTS, uniform=UNIFORMS)
def test_a_token_without_weight_is_never_drawn(dtype, weights, uniform):
    assert weights[draw(torch.tensor([weights], dtype=dtype), [uniform])[0]] > 0


@DTYPES
@given(weights=WEIGHTS)
def test_the_smallest_number_draws_the_first_weight_and_the_largest_the_last(dtype, weights):
    support = [token for token, weight in enumerate(weights) if weight]
    rows = torch.tensor([weights, weights], dtype=dtype)
    first, last = draw(rows, [0.0, BELOW_ONE])
    assert first == support[0]
    # a weight too small beside the others to move their sum cannot be drawn
    assert last == support[-1] or rows[0, last + 1 :].sum() <= 1e-6 * rows[0].sum()


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (BELOW_ONE, 4)],
)
@pytest.mark.parametrize("scale", [1.0, 0.125, 3.0, 1e-200])
def test_weights_of_any_sum_are_drawn_by_inversion(uniform, token, scale):
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64) * scale
    assert draw(weights, [uniform]) == [token]


def test_each_row_is_drawn_with_its_own_number():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(20, 50, generator=generator, dtype=torch.float64)
    uniforms = torch.rand(20, generator=generator, dtype=torch.float64).tolist()
    alone = [draw(row[None], [uniform])[0] for row, uniform in zip(weights, uniforms, strict=True)]
    assert draw(weights, uniforms) == alone
    assert len(set(alone)) > 5


def test_evenly_spread_numbers_draw_each_token_by_its_weight():
    weights = torch.tensor([0.1, 0.0, 2.0, 0.7, 0.2], dtype=torch.float64)
    counts = Counter(draw(weights.expand(3000, -1), [(i + 0.5) / 3000 for i in range(3000)]))
    assert all(abs(counts[token] - 1000 * weight) <= 1 for token, weight in enumerate(weights.tolist()))


# -- noise ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**40), st.text(max_size=8), st.integers(0, 2**31), st.sampled_from([b"token", b"draft"]))
def test_noise_depends_on_seed_record_position_and_use_alone(seed, record, position, use):
    noise = Noise(seed, record)
    value = noise.at(position, use)
    assert 0 <= value < 1
    asked_before = Noise(seed, record)
    for other in range(3):
        asked_before.at(other)
    assert asked_before.at(position, use) == noise.at(position, use) == value
    others = [Noise(seed + 1, record), Noise(seed, record + "x")]
    assert value not in [other.at(position, use) for other in others]
    assert value not in [noise.at(position + 1, use), noise.at(position, b"other")]


def test_a_seed_and_an_id_are_not_run_together():
    assert Noise(1, "23").at(0) != Noise(12, "3").at(0)


@pytest.mark.parametrize("use", [b"token", b"accept", b"residual", b"draft"])
def test_noise_is_uniform_over_positions_and_over_records(use):
    noise = Noise(0, "one")
    assert excess([int(10 * noise.at(position, use)) for position in range(DRAWS)], [0.1] * 10) < 1
    assert excess([int(10 * Noise(0, f"r{n}").at(0, use)) for n in range(DRAWS)], [0.1] * 10) < 1


def test_uses_and_neighbouring_positions_are_uncorrelated():
    noise = Noise(0, "one")
    columns = [[noise.at(p, use) for p in range(DRAWS)] for use in (b"token", b"accept", b"residual", b"draft")]
    columns.append([noise.at(p + 1) for p in range(DRAWS)])
    correlation = torch.corrcoef(torch.tensor(columns)) - torch.eye(len(columns))
    assert correlation.abs().max() < 4 / math.sqrt(DRAWS)


# -- from logits to probabilities -------------------------------------------------------------------------------------

ASKED = [
    {},
    {"temperature": 0.7},
    {"temperature": 2},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.5, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.7, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 1000},
    {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.4},
    {"repetition_penalty": 0.8},
]


@pytest.fixture(scope="module")
def stock():
    """Return the scores that transformers' own generate() would draw from."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, num_key_value_heads=1, **sizes))

    def scores(ids, logits, asked):
        # top_k 0 is off: left out, transformers would take its own 50
        asked = {"temperature": 1.0, "top_k": 0, **asked}
        asked["temperature"] = float(asked["temperature"])  # transformers refuses an int
        config = GenerationConfig(do_sample=True, **asked)
        return model._get_logits_processor(config, ids.shape[1])(ids, logits)

    return scores


def some_logits(rows=7, seed=0):
    return torch.randn(rows, 40, generator=torch.Generator().manual_seed(seed)) * 3


def some_ids(rows=7):
    return torch.randint(40, (rows, 9), generator=torch.Generator().manual_seed(5))


def weights_of(logits, ids, asked):
    sampling = Sampling(**{"temperature": 1.0, **asked})
    return probabilities(penalise(logits, sampling.repetition_penalty, ids.tolist()), sampling)


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_sample_is_drawn_from_what_generate_would_draw_from(stock, asked):
    logits, ids = some_logits(), some_ids()
    before = logits.clone()
    ours = weights_of(logits, ids, asked)
    theirs = torch.softmax(stock(ids, logits, asked).double(), -1)
    assert ours.dtype == torch.float64
    assert torch.equal(ours, theirs)
    assert torch.allclose(ours.sum(-1), torch.ones(7, dtype=torch.float64), atol=1e-12)
    assert torch.equal(logits, before)


def test_another_order_of_the_processors_is_caught(stock, monkeypatch):
    right = chances.warpers_of
    monkeypatch.setattr(chances, "warpers_of", lambda sampling: right(sampling)[::-1])
    asked = {"temperature": 1.7, "top_k": 12, "top_p": 0.7, "min_p": 0.2}
    theirs = torch.softmax(stock(some_ids(), some_logits(), asked).double(), -1)
    assert not torch.allclose(weights_of(some_logits(), some_ids(), asked), theirs)


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3])
def test_each_row_is_penalised_for_its_own_tokens(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = some_logits(4)
    seen = [[3], [1, 1, 2], list(range(40)), [39, 0, 39]]  # of different lengths, some tokens more than once
    expected = [
        RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), row[None])[0]
        for ids, row in zip(seen, logits, strict=True)
    ]
    assert torch.equal(penalise(logits, penalty, seen), torch.stack(expected))


def test_a_penalty_makes_seen_tokens_less_likely_whatever_their_sign():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, float("-inf")]])
    result = penalise(logits, 2.0, [[0, 1, 4]])[0].tolist()
    assert result == [1.0, -4.0, 2.0, -2.0, float("-inf")]


@settings(max_examples=50)
@given(st.permutations(range(12)), st.integers(0, 6), st.floats(0.05, 1), st.floats(0, 1))
def test_the_likeliest_token_is_never_filtered_out(row, top_k, top_p, min_p):
    logits = torch.tensor([row]) / 4
    weights = probabilities(logits, Sampling(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p))
    assert weights[0, int(logits.argmax())] == weights.max() > 0
    assert not weights.isnan().any()
