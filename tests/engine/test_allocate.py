"""How many draft tokens pay, which records belong together, and where the tokens of a forward go."""

import random
from array import array
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import sliding_window_causal_mask_function

from ragspec.engine.drafting import Drafting
from ragspec.engine.kv.cache import RaggedCache
from ragspec.engine.kv.common_prefix import PIECE, WORTH, PrefixIndex, grouped, keys_of, largest_first, shared
from ragspec.engine.model import layout as layout_module
from ragspec.engine.model import masks
from ragspec.engine.model.attention import PackedAttention, attend, attending
from ragspec.engine.model.layout import PADDING, Layout, Segment
from ragspec.engine.notes import Notes
from ragspec.engine.proposers.base import NoProposer, RowProposer, cut
from ragspec.speculation.draft_length import LEAST_GAIN, allocate, least_acceptance
from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.drafters.context import ContextDrafter
from ragspec.speculation.drafters.prompt_lookup import PromptLookup
from ragspec.speculation.step_cost import StepCost

# -- allocate ---------------------------------------------------------------------------------------------------------


def chain(chooser, most=4):
    """Return acceptances of a chain; some tokens are certain, so that values tie."""
    values, value = [], 1.0
    for _ in range(chooser.randint(0, most)):
        value *= chooser.choice([1.0, chooser.random(), chooser.random() ** 0.3])
        values.append(value)
    return values


def bumpy_cost(chooser, **attention):
    """Return a curve that rises by leaps: nothing about it is convex."""
    points, seconds = [], 1.0
    for tokens in range(1, 21):
        points.append((tokens, seconds))
        seconds += chooser.choice([0.0, 0.01, 0.2, 0.5]) * seconds
    return StepCost(points, **attention)


def rate(lengths, acceptances, cost, reach):
    """Return the expected tokens per second of a step that verifies `lengths`."""
    rows = len(acceptances)
    expected = rows + sum(sum(values[:length]) for values, length in zip(acceptances, lengths, strict=True))
    return expected / cost(rows + sum(lengths), rows, reach)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_no_other_choice_of_prefixes_makes_more_tokens_per_second(rows):
    drafted = 0
    for seed in range(150):
        chooser = random.Random(seed)
        acceptances = [chain(chooser) for _ in range(rows)]
        cost = bumpy_cost(chooser, per_row_slot=chooser.choice([0.0, 0.001]), per_slot=chooser.choice([0.0, 0.0005]))
        lengths = allocate(acceptances, cost, 50)
        rates = [rate(each, acceptances, cost, 50) for each in product(*(range(len(v) + 1) for v in acceptances))]
        plain = rates[0]  # of no drafts at all
        if max(rates) > plain * LEAST_GAIN:
            assert rate(lengths, acceptances, cost, 50) == pytest.approx(max(rates), rel=1e-12)
            drafted += 1
        else:
            assert lengths == [0] * rows
    assert 10 < drafted < 140, "both sides are to be tried"


def test_a_leap_in_the_cost_is_jumped_over_where_what_lies_behind_pays():
    leap = StepCost([(1, 1.0), (2, 1.9), (8, 1.95), (9, 9.0)])
    assert allocate([[0.8]], leap, 0) == [0]  # two tokens cost nearly twice one
    assert allocate([[0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]], leap, 0) == [7]  # eight cost no more than two


@pytest.mark.parametrize(("acceptance", "length"), [(0.015, 0), (0.02 * 0.99, 0), (0.03, 1)])
def test_a_gain_of_less_than_two_percent_is_left_alone(acceptance, length):
    assert allocate([[acceptance]], StepCost([(1, 1.0), (100, 1.0)]), 0) == [length]


@pytest.mark.parametrize(
    ("acceptances", "lengths"),
    [([[], []], [0, 0]), ([[0.9], []], [1, 0]), ([[], [0.9, 0.8]], [0, 2]), ([[0.9, 0.01], [0.01]], [1, 0])],
)
def test_rows_get_what_their_own_chains_are_worth(acceptances, lengths):
    assert allocate(acceptances, StepCost([(1, 1.0), (101, 6.0)]), 0) == lengths


@given(st.integers(0, 10**6), st.integers(0, 40))
def test_the_order_of_the_rows_does_not_matter(seed, prefill_tokens):
    chooser = random.Random(seed)
    acceptances = [[0.9**depth * (0.5 + 0.5 * chooser.random()) for depth in range(1)] for _ in range(5)]
    for values in acceptances:
        while chooser.random() < 0.6:
            values.append(values[-1] * chooser.uniform(0.1, 0.999))
    cost = bumpy_cost(chooser, per_slot=0.001)
    order = chooser.sample(range(5), 5)
    lengths = allocate(acceptances, cost, 20, prefill_tokens)
    assert allocate([acceptances[i] for i in order], cost, 20, prefill_tokens) == [lengths[i] for i in order]


CURVED = [
    (1, 16.2),
    (2, 16.5),
    (4, 18.3),
    (8, 23),
    (16, 36.4),
    (32, 56.8),
    (64, 103),
    (128, 194),
    (256, 404),
    (512, 769),
]
FLAT = [(1, 20.0), (64, 21.0), (128, 23.0), (256, 30.0), (512, 55.0)]


@pytest.mark.parametrize("points", [CURVED, FLAT], ids=["cpu", "gpu"])
@pytest.mark.parametrize("prefill_tokens", [0, 30, 400])
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_chains_that_end_where_nothing_pays_leave_the_choice_as_it_is(points, prefill_tokens, rows):
    shorter = drafted = 0
    for seed in range(60):
        chooser = random.Random(seed)
        confident = chooser.random()
        acceptances = [
            [chooser.uniform(confident, 1) ** i for i in range(1, chooser.randint(1, 24))] for _ in range(rows)
        ]
        acceptances = [sorted(values, reverse=True) for values in acceptances]
        cost = StepCost(points, per_slot=1e-5, per_row_slot=5e-5)
        least = least_acceptance(rows, cost, 400, prefill_tokens)
        ended = [[value for value in values if value >= least] for values in acceptances]
        lengths = allocate(acceptances, cost, 400, prefill_tokens)
        assert allocate(ended, cost, 400, prefill_tokens) == lengths
        drafted += sum(lengths) > 0
        shorter += sum(map(len, ended)) < sum(map(len, acceptances))
    assert drafted > 3
    assert shorter > 30 or points is FLAT or rows == 1


def test_the_more_rows_the_sooner_a_chain_ends():
    cost = StepCost(CURVED)
    least = [least_acceptance(rows, cost, 0) for rows in (1, 8, 64)]
    assert least[0] < 0.05 < least[1] < least[2]
    assert 0.3 < least[2] < 0.5
    assert least_acceptance(64, StepCost(FLAT), 0) < 0.1


@pytest.mark.parametrize(("count", "drafted"), [(8, 16), (64, 0)])
def test_nobody_is_asked_where_not_even_a_certain_draft_pays(count, drafted):
    """Beside a prompt a token of many rows costs more than all that it could save."""
    cost = StepCost([(1, 0.020), (64, 0.060), (512, 0.500)])
    rows = [SimpleNamespace(tokens=[0] * 9, grammar=None)] * count
    asked = []

    class Sure(NoProposer):
        def propose(self, rows, prefill_tokens):
            asked.append(prefill_tokens)
            return cut([Draft([1, 2], [1.0, 1.0])] * count, rows, cost, prefill_tokens)

    drafts = Drafting(Sure(), None, Notes(), cost=cost).drafts(rows, 400)
    assert sum(len(draft.token_ids) for draft in drafts) == drafted
    assert asked == [400] * (drafted > 0)
    assert sum(allocate([[1.0, 1.0]] * count, cost, 9, 400)) == drafted
    Drafting(Sure(), None, Notes(), cost=cost).drafts(rows, 0)
    assert asked[-1] == 0, "a step of decoding alone teaches what drafts are worth"


@pytest.mark.parametrize("drafter", [ContextDrafter, PromptLookup])
def test_who_looks_on_follows_chains_no_further_than_who_drafts(drafter):
    prompt = list(range(40)) * 2
    request = SimpleNamespace(token_ids=prompt, passages=())
    rows = [
        SimpleNamespace(place=place, request=request, tokens=prompt, written=(), room=100, grammar=None)
        for place in range(64)
    ]

    def lengths(cost, ask):
        proposer = RowProposer(drafter(), None, cost)
        for row in rows:
            proposer.admit(row, row.place, 0)
        ask(proposer)
        return [len(draft.token_ids) for draft in proposer.guess(rows)]

    def asked(proposer):
        proposer.propose(rows, 0)

    def looks_on(proposer):
        proposer.watch(rows)

    bounded = lengths(StepCost(CURVED), asked)
    assert lengths(StepCost(CURVED), looks_on) == bounded
    assert 0 < sum(bounded) < sum(lengths(None, asked))


SLOPE = StepCost([(1, 1.0), (101, 2.0), (201, 12.0)])  # a hundredth of a second per token, from 101 on a tenth


@pytest.mark.parametrize(
    ("prefill_tokens", "lengths"),
    [
        (20, [2, 1]),  # the best step without prompts: 2.48 tokens in 1.04 s; in the 0.01 s of a token it writes 0.0238
        (140, [1, 0]),  # 0.1 s: 0.238
    ],
)
def test_beside_a_prompt_a_draft_token_has_to_earn_its_own_seconds(prefill_tokens, lengths):
    acceptances = [[0.3, 0.03, 0.019], [0.15, 0.01]]
    assert allocate(acceptances, SLOPE, 0, prefill_tokens) == lengths


def test_what_a_token_costs_beside_a_prompt_is_learnt():
    cost = StepCost([(1, 1.0), (101, 2.0)])
    assert allocate([[0.3], [0.15]], cost, 0, 20) == [1, 1]
    cost.observe_beside(490, 10, 1, 0, 50.0)  # 0.1 s a token
    assert allocate([[0.3], [0.15]], cost, 0, 20) == [1, 0]


def test_a_step_that_was_held_up_teaches_little():
    cost = StepCost([(1, 1.0), (101, 2.0)])
    cost.observe_beside(490, 10, 1, 0, 5.0)
    cost.observe_beside(490, 10, 1, 0, 5000.0)
    assert allocate([[0.3], [0.15]], cost, 0, 20) == [1, 1]


@pytest.mark.parametrize("prefill_tokens", [1, 30, 300])
def test_beside_a_prompt_the_plain_steps_threshold_does_not_count(prefill_tokens):
    """The prompt is paid anyway: one likely token is worth it, though it would not lift a plain step by 2%."""
    rows = 60
    acceptances = [[0.9], *([[]] * (rows - 1))]
    flat = StepCost([(1, 1.0), (1000, 1.0)])
    assert allocate(acceptances, flat, 0) == [0] * rows
    assert allocate(acceptances, flat, 0, prefill_tokens) == [1] + [0] * (rows - 1)


# -- StepCost ---------------------------------------------------------------------------------------------------------

SECONDS = st.lists(st.floats(1e-4, 10), min_size=1, max_size=8)


@given(SECONDS, st.integers(1, 4), st.floats(0, 1e-3), st.floats(0, 1e-3))
def test_a_step_of_more_tokens_never_costs_less_at_the_start(seconds, apart, per_slot, per_row_slot):
    cost = StepCost([(1 + apart * i, s) for i, s in enumerate(seconds)], per_slot, per_row_slot)
    curve = [cost(tokens, 3, 50) for tokens in range(1, 60)]
    assert all(one <= other * (1 + 1e-12) for one, other in pairwise(curve))
    assert cost(8, 3, 50) <= cost(8, 4, 50) <= cost(8, 4, 60)
    assert all(cost.marginal(tokens, 50) >= 0 for tokens in range(1, 60))


def test_cost_lies_on_the_line_between_the_points_and_beyond_them():
    cost = StepCost([(2, 1.0), (4, 2.0), (8, 3.0)], per_slot=0.001, per_row_slot=0.01)
    assert [cost(tokens, 0, 0) for tokens in (1, 2, 3, 4, 6, 8, 12)] == pytest.approx([1, 1, 1.5, 2, 2.5, 3, 4])
    assert cost(4, 3, 100) == pytest.approx(2.0 + 100 * (3 * 0.01 + 4 * 0.001))
    assert cost.marginal(8, 0) == pytest.approx(0.25)
    assert cost.marginal(8, 100) == pytest.approx(0.35)
    assert StepCost([(1, 3.0)])(50, 2, 10) == 3.0


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 2.0, 5.0])
def test_a_machine_that_is_faster_or_slower_than_at_the_start_is_learnt(factor):
    points = [(1, 1.0), (8, 2.0), (64, 10.0)]
    cost, true = (
        StepCost(points, 1e-4, 1e-3),
        StepCost([(n, s * factor) for n, s in points], factor / 1e4, factor / 1e3),
    )
    for _ in range(150):
        for tokens in (4, 20):
            cost.observe(tokens, 2, 50, true(tokens, 2, 50))
    for tokens in (1, 4, 10, 20, 60):  # sizes that were never seen too
        assert cost(tokens, 2, 50) == pytest.approx(true(tokens, 2, 50), rel=0.03)
    assert cost.marginal(4, 50) == pytest.approx(true.marginal(4, 50), rel=0.03)


def test_a_size_that_is_slower_than_its_neighbours_is_learnt():
    cost = StepCost([(1, 1.0), (64, 1.0)])
    seconds = {4: 1.0, 9: 1.5, 20: 1.0}
    for _ in range(200):
        for tokens, taken in seconds.items():
            cost.observe(tokens, 2, 0, taken)
    for tokens, taken in seconds.items():
        assert cost(tokens, 2, 0) == pytest.approx(taken, rel=0.03)


def test_one_interrupted_step_hardly_changes_what_is_expected():
    cost = StepCost([(1, 1.0), (64, 10.0)])
    for _ in range(30):
        cost.observe(4, 2, 0, 1.43)
    before = cost(4, 2, 0)
    cost.observe(4, 2, 0, 1000.0)
    assert before < cost(4, 2, 0) < before * 1.15


def test_a_slower_size_is_avoided_once_it_is_known():
    cost = StepCost([(1, 1.0), (64, 1.1)])
    acceptances = [[0.4] * 8]
    assert allocate(acceptances, cost, 0) == [8]
    for _ in range(60):
        cost.observe(9, 1, 0, 6.0)  # eight and more take long
        cost.observe(4, 1, 0, 1.0)
        cost.observe(1, 1, 0, 1.0)
    assert allocate(acceptances, cost, 0) == [6]


# -- prefixes ---------------------------------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("kind", [list, lambda ids: array("i", ids)], ids=["lists", "arrays"])


@KINDS
@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20), st.integers(0, 30))
def test_shared_is_the_length_of_the_common_beginning(kind, one, other, both):
    one, other = [2] * both + one, [2] * both + other
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert shared(kind(one), kind(other)) == length


def prompts_with_common_beginnings(chooser):
    """Return prompts of a few heads, some with a head of their own inside it, and some of no head at all."""
    system = [9] * chooser.choice([0, 5, 50])
    heads = [[n, *(chooser.randrange(3) for _ in range(chooser.randint(20, 60)))] for n in range(3)]
    prompts = []
    for _ in range(chooser.randint(0, 14)):
        tail = [chooser.randrange(3) for _ in range(chooser.randint(0, 50))]
        head = chooser.choice([*heads, []])
        prompts.append(system + head[: chooser.choice([25, 100])] + tail)
    return prompts + chooser.sample(prompts, min(len(prompts), chooser.choice([0, 0, 2])))


@KINDS
@given(st.integers(0, 10**6))
def test_groups_are_those_that_begin_alike_beyond_what_all_have_in_common(kind, seed):
    prompts = prompts_with_common_beginnings(random.Random(seed))
    common = 0
    if len(prompts) > 2:
        while all(len(p) > common and p[: common + 1] == prompts[0][: common + 1] for p in prompts):
            common += 1
    expected = {}
    for i, prompt in enumerate(prompts):
        long_enough = len(prompt) >= common + WORTH
        expected.setdefault(tuple(prompt[: common + WORTH]) if long_enough else i, []).append(i)
    groups = grouped([kind(prompt) for prompt in prompts])
    assert sorted(map(sorted, groups)) == sorted(expected.values())
    assert sorted(i for group in groups for i in group) == list(range(len(prompts)))


@given(st.integers(0, 10**6))
def test_groups_come_in_the_order_of_the_input_and_are_sorted_inside(seed):
    prompts = prompts_with_common_beginnings(random.Random(seed))
    groups = grouped(prompts)
    firsts = [min(group) for group in groups]
    assert firsts == sorted(firsts)
    for group in groups:
        assert [prompts[i] for i in group] == sorted(prompts[i] for i in group)
    singles = [group[0] for group in groups if len(group) == 1]
    assert singles == sorted(singles)


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), max_size=70)), max_size=20), st.data())
def test_the_slots_that_begin_most_alike_are_found(puts, data):
    index, texts = PrefixIndex(), {}
    head = [1] * data.draw(st.integers(0, 40))
    for slot, text in puts:
        texts[slot] = head + text
        index.put(slot, keys_of(texts[slot]))
    wanted = head + data.draw(st.lists(st.integers(0, 2), max_size=70))
    slots, least = index.nearest(keys_of(wanted))
    common = {slot: shared(text, wanted) for slot, text in texts.items()}
    assert set(slots) == {slot for slot, length in common.items() if length >= least and least}
    assert max(common.values(), default=0) < min(least + PIECE, 2 * least + 1)


def test_a_system_prompt_that_all_share_groups_nobody():
    system = list(range(200))
    assert grouped([[*system, 5, n] for n in range(6)]) == [[n] for n in range(6)]
    assert grouped([[*system, 5], [*system, 6]]) == [[0, 1]]  # of two, it is what they share


# -- layout -----------------------------------------------------------------------------------------------------------

ROWS, SLOTS = 6, 16
CPU = torch.device("cpu")


@st.composite
def layouts(draw):
    """Segments of different rows in any order, some of them alone."""
    rows = draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True))
    segments = [
        Segment(row, draw(st.integers(0, SLOTS - 4)), draw(st.integers(1, 4)), draw(st.booleans())) for row in rows
    ]
    return Layout(segments, SLOTS, CPU)


def packed_tokens(layout):
    """Return (row, position) of every token in packed order."""
    return [(s.row, s.start + i) for s in layout.segments for i in range(s.count)]


def window_rule(window):
    """Return the rule that a model with a sliding window builds; None for plain causal attention."""
    return None if window is None else masks.mask_rule_of(mask_function=sliding_window_causal_mask_function(window))


def in_sight(position, window):
    """Return the slots that a token sees: itself and what came before it, inside the window."""
    return list(range(max(0, position + 1 - (window or SLOTS)), position + 1))


@given(layouts())
def test_tokens_are_written_to_the_slots_of_their_positions(layout):
    places = packed_tokens(layout)
    store = torch.full((ROWS * SLOTS,), -1)
    store[layout.writes] = torch.arange(layout.tokens)
    rows = store.view(ROWS, SLOTS)
    assert [int(rows[place]) for place in places] == list(range(layout.tokens))
    assert int((store >= 0).sum()) == layout.tokens == len(places)
    assert layout.positions.tolist() == [position for _, position in places]
    assert [places[start] for start in layout.starts] == [(s.row, s.start) for s in layout.segments]


@given(layouts())
def test_padding_and_back_gives_every_token_once_to_its_own_place(layout):
    packed = torch.arange(layout.tokens)
    out, times = torch.full_like(packed, -1), torch.zeros_like(packed)
    places = packed_tokens(layout)
    for run in layout.runs:
        padded = packed[run.gather].view(-1, run.longest)
        rows = range(run.rows.start, run.rows.stop)
        assert [{places[i][0] for i in line} for line in padded.tolist()] == [{row} for row in rows]
        kept = padded.flatten() if run.keep is None else padded.flatten()[run.keep]
        out[run.target] = kept
        times[run.target] += 1
    for alone in layout.alone:
        out[alone.packed] = packed[alone.packed]
        times[alone.packed] += 1
        assert alone.segment.alone
    assert torch.equal(out, packed)
    assert torch.equal(times, torch.ones_like(packed))


@given(layouts())
def test_neighbouring_rows_of_similar_length_attend_together_and_no_others(layout):
    counts = {s.row: s.count for s in layout.segments if not s.alone}
    ranges = [range(run.rows.start, run.rows.stop) for run in layout.runs]
    assert [row for rows in ranges for row in rows] == sorted(counts)
    for run, rows in zip(layout.runs, ranges, strict=True):
        assert run.longest == max(counts[row] for row in rows)
        assert sum(run.longest - counts[row] for row in rows) <= PADDING["cpu"] * len(rows)
    for one, other in pairwise(ranges):  # two that touch are apart because together they would be padded
        first = [counts[row] for row in one]
        added = counts[other.start] - max(first)
        assert one.stop < other.start or added * len(first) > PADDING["cpu"] or -added > PADDING["cpu"]


def slots_seen(seen):
    """Return, row by row, the slots that each query of a AttentionMask sees."""
    return [
        [[seen.first + slot for slot, value in enumerate(query) if value == 0] for query in row]
        for row in seen.mask[:, 0].tolist()
    ]


@given(layouts(), st.sampled_from([None, 1, 3, 8, 100]), st.integers(1, 3))
def test_a_token_sees_itself_and_what_came_before_it_inside_the_window(layout, window, groups):
    rule = window_rule(window)
    for run in layout.runs:
        seen = run.sight(rule, groups, torch.float32)
        rows = run.rows.stop - run.rows.start
        assert seen.mask.shape == (rows, 1, groups * run.longest, run.reach - seen.first)
        assert set(seen.mask.unique().tolist()) <= {0.0, float("-inf")}
        positions = layout.positions[run.gather].view(-1, run.longest).tolist()
        # a padded query stands for its row's first: it must see something, or it would become a NaN
        assert slots_seen(seen) == [[in_sight(position, window) for position in line] * groups for line in positions]
        assert seen.first == min(in_sight(min(line), window)[0] for line in positions)
        assert run.sight(rule, groups, torch.float32) is seen
    for alone in layout.alone:
        seen = alone.sight(rule, groups, torch.float32, CPU)
        positions = range(alone.segment.start, alone.segment.start + alone.segment.count)
        assert slots_seen(seen) == [[in_sight(position, window) for position in positions] * groups]
        assert seen.causal == all(in_sight(position, window)[0] == 0 for position in positions)


def test_masks_of_another_window_are_not_mixed_up():
    run = Layout([Segment(0, 6, 2)], SLOTS, CPU).runs[0]
    two = window_rule(2)
    assert slots_seen(run.sight(None, 1, torch.float32)) != slots_seen(run.sight(two, 1, torch.float32))
    assert run.sight(two, 2, torch.float32).mask.shape != run.sight(two, 1, torch.float32).mask.shape


def test_rows_in_packed_order_and_of_one_length_need_no_copies():
    (run,) = Layout([Segment(1, 7, 2), Segment(2, 3, 2)], SLOTS, CPU).runs
    assert run.keep is None
    assert run.target == slice(0, 4)


def attended(layout, window, dtype=torch.float64, cap=None, sinks=False):
    """Return what attention makes of random queries, and what a loop over single tokens makes of them."""
    torch.manual_seed(layout.tokens)
    heads, kv_heads, size = 4, 2, 8
    cache = RaggedCache(ROWS)
    cache.reserve(SLOTS)
    keys, values = torch.randn(2, 1, kv_heads, layout.tokens, size, dtype=dtype)
    with cache.forward(layout):
        layer = cache.write(keys, values)
    held = torch.randn(2, kv_heads, ROWS, cache.slots, size, dtype=dtype)  # what stood there, stale slots too
    layer.keys, layer.values = held[0], held[1]
    queries = torch.randn(1, heads, layout.tokens, size, dtype=dtype)
    sink = torch.randn(heads, dtype=dtype) if sinks else None
    rule = window_rule(window)
    with cache.forward(layout), attending(PackedAttention(cache, layout)):
        out, _ = attend(None, queries, keys, values, rule, scaling=0.3, softcap=cap, s_aux=sink)

    expected = torch.empty_like(out)
    for i, (row, position) in enumerate(packed_tokens(layout)):
        seen = in_sight(position, window)
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = 0.3 * layer.keys[group, row, seen] @ queries[0, head, i]
            scores = cap * torch.tanh(scores / cap) if cap else scores
            scores = torch.cat([scores, sink[head : head + 1]]) if sinks else scores
            weights = torch.softmax(scores, 0)[: len(seen)]
            expected[0, i, head] = weights @ layer.values[group, row, seen]
    return out, expected


def test_a_prompt_in_pieces_attends_as_a_whole(monkeypatch):
    segments = [Segment(2, 0, 9, True), Segment(0, 3, 5), Segment(4, 2, 7, True)]
    whole, expected = attended(Layout(segments, 64, CPU), None)
    monkeypatch.setitem(layout_module.PIECE, "cpu", 4)
    pieces = Layout(segments, 64, CPU)
    assert [(alone.packed.start, alone.packed.stop) for alone in pieces.alone] == [
        *((0, 4), (4, 8), (8, 9)),
        *((14, 18), (18, 21)),
    ]
    for window in (None, 3):
        out, expected = attended(pieces, window)
        assert torch.allclose(out, expected, atol=1e-9)
    assert torch.allclose(whole, attended(pieces, None)[0], atol=1e-9)


def ragged_layout(slots):
    return Layout(
        [Segment(4, 0, 3), Segment(0, 5, 4, True), Segment(3, 7, 1), Segment(1, 0, 4, True), Segment(5, 9, 4)],
        slots,
        CPU,
    )


@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_packed_attention_is_that_of_each_token_by_itself(window):
    out, expected = attended(ragged_layout(64), window)
    assert torch.allclose(out, expected, atol=1e-9)


def test_a_mask_that_is_one_slot_off_is_caught(monkeypatch):
    right = layout_module.attention_mask
    monkeypatch.setattr(
        layout_module, "attention_mask", lambda queries, *rest: right(queries - (queries > 0).long(), *rest)
    )
    out, expected = attended(ragged_layout(64), None)
    assert not torch.allclose(out, expected, atol=1e-3)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("cap", "sinks"), [(0.5, False), (None, True), (0.5, True)])
def test_capped_scores_and_sinks_are_those_of_each_token_by_itself(window, cap, sinks):
    out, expected = attended(ragged_layout(64), window, cap=cap, sinks=sinks)
    assert torch.allclose(out, expected, atol=1e-6)
    assert not torch.allclose(out, attended(ragged_layout(64), window)[0], atol=1e-3)


@settings(max_examples=20)
@given(layouts(), st.sampled_from([None, 2, 6]))
def test_packed_attention_is_right_for_any_segments(layout, window):
    wide = Layout(layout.segments, 64, CPU)  # a cache has slots by the 64
    out, expected = attended(wide, window)
    assert torch.allclose(out, expected, atol=1e-9)


def test_the_largest_shared_prefixes_come_first():
    prompts = [[1] * 40 + [n] for n in range(2)] + [[2] * 90 + [n] for n in range(4)] + [[3, 3, 3]]
    random.Random(1).shuffle(prompts)
    groups = largest_first(grouped(prompts), prompts)
    assert [prompts[group[0]][0] for group in groups] == [2, 1, 3]
    assert sorted(index for group in groups for index in group) == list(range(7))
