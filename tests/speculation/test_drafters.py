"""Drafters that need no model: what they guess, how sure they say they are, and what they may learn from."""

import itertools
import random
from bisect import bisect_right
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.speculation.drafters import context
from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.drafters.calibration import LENGTHS, PRIOR, Calibration, length_bucket
from ragspec.speculation.drafters.context import OTHER_OUTPUT, PRIOR_LOG_ODDS, PROMPT, ContextDrafter, SharedPool
from ragspec.speculation.drafters.ngram_index import (
    KEPT,
    LEAST_ACCEPTANCE,
    LONGEST_MATCH,
    Match,
    NgramIndex,
    Proposals,
    match_length,
)
from ragspec.speculation.drafters.prompt_lookup import PromptLookup
from ragspec.speculation.methods import METHODS, DrafterSettings

TEXTS = st.lists(st.integers(0, 3), max_size=60)  # few tokens: everything repeats
ORIGINS = range(4)


# -- Draft ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probabilities", [None, [[0.5], [0.25], [0.125]]])
@pytest.mark.parametrize("length", range(5))
def test_a_cut_draft_keeps_what_belongs_to_its_tokens(length, probabilities):
    draft = Draft([7, 8, 9], [0.9, 0.5, 0.1], [3, None, 5], probabilities)
    cut = draft.cut(length)
    assert cut.token_ids == [7, 8, 9][:length]
    assert cut.cumulative_acceptance == [0.9, 0.5, 0.1][:length]
    assert cut.sources == [3, None, 5][:length]
    assert cut.probabilities == (None if probabilities is None else probabilities[:length])
    assert draft.token_ids == [7, 8, 9]


def test_the_old_name_of_cumulative_acceptance_is_still_accepted():
    assert Draft([7, 8], survival=(0.5, 0.25)) == Draft([7, 8], [0.5, 0.25])


# -- Calibration ------------------------------------------------------------------------------------------------------


def test_every_length_falls_into_the_bucket_that_begins_at_or_before_it():
    for length in range(60):
        assert length_bucket(length) == bisect_right(LENGTHS, length) - 1


def known(origin=0, length=4, share=1.0, guess=7, before=8, **rest):
    return Calibration.features(origin, length, guess, before, share=share, **rest)


def test_what_may_differ_in_likelihood_is_told_apart():
    ids = (0, 1, 2**21 - 1)
    seen = [
        known(origin, length, share, guess, before, depth=depth, origins=origins, matches=matches)
        for origin, length, share in itertools.product(ORIGINS, (1, 2, 40), (0.4, 0.7, 1.0))
        for guess, before in itertools.product(ids, ids)
        for depth, origins, matches in itertools.product((0, 1, 9), (1, 2, 4), (1, 9))
        if depth < length
    ]
    match, vote, guess, before, start = (set(column) for column in zip(*seen, strict=True))
    assert len(match) == len(ORIGINS) * 3
    assert len(vote) == 3 * 3 * 2
    assert guess == before == set(ids)
    assert len(start) == 6  # (1, 0), (2, 0), (12, 0), (1, 1), (12, 1), (12, 3)


def test_families_of_features_learn_apart():
    """A token has one weight as the guess and another as the token before it."""
    calibration, start = Calibration(), Calibration()
    for _ in range(30):
        calibration.observe(known(0, 4, guess=7, before=8), False)
    swapped = known(1, 9, 0.4, guess=8, before=7)  # only the ids are the same
    assert calibration.estimate(swapped) == start.estimate(swapped)


def test_an_estimate_is_learnt_for_all_that_is_known_of_a_guess():
    start = Calibration()
    for others in (
        known(guess=1, before=2, origin=1, length=9, share=0.4),  # nothing but the beginning is the same
        known(guess=7, before=2, origin=1, length=9, share=0.4),
        known(guess=1, before=8, origin=1, length=9, share=0.4),
        known(guess=1, before=2, origin=0, length=4, share=0.4),
        known(guess=1, before=2, origin=1, length=9, share=1.0),
    ):
        calibration = Calibration()
        for _ in range(30):
            calibration.observe(known(), False)
        shared = sum(a == b for a, b in zip(others, known(), strict=True))
        assert (calibration.estimate(others) < start.estimate(others)) == bool(shared)
        assert calibration.estimate(known()) < 0.1


@pytest.mark.parametrize("hits", [0.0, 0.3, 0.9, 1.0])
def test_an_estimate_comes_to_the_share_of_hits(hits):
    calibration = Calibration()
    estimates = []
    for n in range(600):
        estimates.append(calibration.estimate(known()))
        calibration.observe(known(), int(n * hits) < int((n + 1) * hits))
    assert sum(estimates[300:]) / 300 == pytest.approx(hits, abs=0.03)


def test_old_observations_fade():
    calibration = Calibration()
    for _ in range(10_000):
        calibration.observe(known(), True)
    for _ in range(100):
        calibration.observe(known(), False)
    assert calibration.estimate(known()) < 0.2


@given(st.lists(st.tuples(st.sampled_from([0.4, 0.7, 1.0]), st.booleans()), max_size=40))
def test_asking_for_an_estimate_changes_none(observations):
    asked, quiet = Calibration(), Calibration()
    every = [known(share=share) for share in (0.4, 0.7, 1.0)]
    for share, hit in observations:
        for features in every:
            asked.estimate(features)
            asked.odds(0, 4)
        asked.observe(known(share=share), hit)
        quiet.observe(known(share=share), hit)
    assert [asked.estimate(features) for features in every] == [quiet.estimate(features) for features in every]


@given(st.lists(st.tuples(st.sampled_from(ORIGINS), st.integers(1, 40), st.floats(0, 1), st.booleans()), max_size=60))
def test_estimates_are_probabilities_whatever_happens(observations):
    calibration = Calibration(PRIOR_LOG_ODDS)
    for origin, length, share, hit in observations:
        calibration.observe(known(origin, length, share), hit)
    every = [known(origin, length, share) for origin in ORIGINS for length in LENGTHS for share in (0.4, 1)]
    assert all(0 < calibration.estimate(features) < 1 for features in every)
    assert calibration.trials == len(observations)
    assert calibration.hits == sum(hit for *_, hit in observations)


@pytest.mark.parametrize("origin", ORIGINS)
def test_at_first_longer_matches_are_believed_more_and_other_records_less(origin):
    calibration = Calibration(PRIOR_LOG_ODDS)
    estimates = [calibration.odds(origin, length) for length in LENGTHS]
    assert estimates == sorted(estimates)
    own = [calibration.odds(PROMPT, length) for length in LENGTHS]
    assert own == pytest.approx([prior / (1 - prior) for prior in PRIOR])
    assert origin in (PROMPT, context.OUTPUT) or all(a < b for a, b in zip(estimates, own, strict=True))


def test_at_first_more_agreement_is_believed_more():
    calibration = Calibration()
    for fewer, more in (({"share": 0.4}, {"share": 0.7}), ({"share": 0.7}, {"share": 1.0})):
        assert calibration.estimate(known(**fewer)) < calibration.estimate(known(**more))
    counts = [(1, 1), (1, 2), (2, 3), (3, 4)]
    estimates = [calibration.estimate(known(origins=origins, matches=matches)) for origins, matches in counts]
    assert estimates == sorted(set(estimates))


@pytest.mark.parametrize(("truth", "low", "high"), [(0.5, 0.0, 0.03), (0.9, 0.37, 0.43)])
def test_the_error_is_the_distance_between_estimates_and_what_came(truth, low, high, monkeypatch):
    calibration = Calibration()
    assert calibration.error is None
    monkeypatch.setattr(calibration, "estimate", lambda features: 0.5)  # estimates that never learn
    for n in range(1000):
        calibration.observe(known(), n % 10 < truth * 10)
    assert low <= calibration.error <= high


# -- NgramIndex -------------------------------------------------------------------------------------------------------


def positions_of(text, suffix, smallest, largest):
    """Return what NgramIndex.find promises, by looking everywhere."""
    found = []
    for n in range(min(largest, len(suffix)), smallest - 1, -1):
        ends = [end for end in range(n, len(text) + 1) if text[end - n : end] == suffix[-n:]][-KEPT:]
        found += [end for end in reversed(ends) if end not in found]
    return sorted(found[:KEPT])


@given(st.lists(TEXTS, max_size=4), TEXTS, st.sampled_from([(1, 3), (1, 1), (2, 4), (3, 3)]))
def test_the_index_finds_the_latest_positions_of_the_longest_ngrams(chunks, suffix, sizes):
    index, text = NgramIndex(*sizes), []
    for chunk in chunks:
        index.extend(chunk)
        text += chunk
    assert index.tokens == text
    for asked in (suffix, text):
        found = index.find(asked)
        assert found == positions_of(text, asked, *sizes)
        assert all(text[position - sizes[0] : position] == asked[-sizes[0] :] for position in found)


@given(TEXTS, TEXTS, st.integers(0, 60), st.integers(0, 10))
def test_a_match_is_as_long_as_the_texts_agree(text, suffix, position, floor):
    position, floor = min(position, len(text)), min(floor, position, len(text))
    length = match_length(text, position, suffix, floor)
    agree = 0
    while position - agree > floor and agree < len(suffix) and text[position - agree - 1] == suffix[-agree - 1]:
        agree += 1
    assert length == min(agree, LONGEST_MATCH)


# -- Proposals --------------------------------------------------------------------------------------------------------


def match(continuation, origin=0, length=3, prompt=False, before=()):
    """Return a match whose text goes on with `continuation`."""
    text = [*before, *continuation]
    return Match(text, len(before), len(text), origin, length, prompt)


def test_a_chain_ends_where_it_is_of_no_use_any_more():
    calibration = Calibration()
    whole = Proposals(calibration).build([match(range(20))], 20, 0)
    calibration.least = whole.cumulative_acceptance[3]
    assert Proposals(calibration).build([match(range(20))], 20, 0) == whole.cut(4)


def test_the_majority_of_the_votes_is_drafted():
    proposals = Proposals(Calibration())
    draft = proposals.build([match([1, 2, 3]), match([9, 9, 9]), match([1, 2, 4]), match([1, 5, 5])], 3, 0)
    assert draft.token_ids[:2] == [1, 2]


def test_a_long_match_outvotes_a_short_one():
    draft = Proposals(Calibration()).build([match([1], length=1), match([2], length=12)], 1, 0)
    assert draft.token_ids == [2]


def test_agreement_raises_the_confidence_and_dissent_lowers_it():
    calibration = Calibration()
    for n in range(200):
        calibration.observe(known(0, 3, 1.0, guess=1), True)
        calibration.observe(known(0, 3, 0.5, guess=1), n % 2)
    alone = Proposals(calibration).build([match([1])], 1, 0)
    disputed = Proposals(calibration).build([match([1]), match([2])], 1, 0)
    assert disputed.cumulative_acceptance[0] < alone.cumulative_acceptance[0]


def test_a_match_that_lost_a_vote_has_no_further_say():
    # the two that say 9 are outvoted together; after that, they would outvote each of the others by itself
    matches = [match([1, 2]), match([1, 5]), match([9, 7]), match([9, 7], length=1)]
    assert Proposals(Calibration()).build(matches, 2, 0).token_ids == [1, 5]


def test_a_chain_goes_on_with_those_that_have_not_ended():
    draft = Proposals(Calibration()).build([match([1]), match([1, 2], length=12)], 9, 0)
    assert draft.token_ids == [1, 2]


@given(
    st.lists(st.tuples(TEXTS, st.sampled_from(ORIGINS), st.integers(0, 30)), max_size=6),
    st.integers(0, 40),
    st.integers(0, 20),
)
def test_cumulative_acceptance_is_a_probability_that_never_rises(texts, limit, prompt_tokens):
    matches = [match(text, origin, length, prompt=origin == PROMPT) for text, origin, length in texts]
    draft = Proposals(Calibration(PRIOR_LOG_ODDS)).build(matches, limit, prompt_tokens)
    assert len(draft.token_ids) == len(draft.cumulative_acceptance) == len(draft.sources) <= limit
    assert all(LEAST_ACCEPTANCE <= p <= 1 for p in draft.cumulative_acceptance)
    assert draft.cumulative_acceptance == sorted(draft.cumulative_acceptance, reverse=True)
    assert all(source is None or source < prompt_tokens for source in draft.sources)


def test_only_the_rows_own_prompt_is_named_as_a_source():
    prompt = [5, 6, 7, 8]
    own = Proposals(Calibration()).build([match(prompt, prompt=True)], 4, 3)
    foreign = Proposals(Calibration()).build([match(prompt)], 4, 3)
    assert own.token_ids == foreign.token_ids == prompt
    assert own.sources == [0, 1, 2, None]
    assert foreign.sources == [None] * 4


def test_a_guess_is_scored_whether_or_not_it_was_verified():
    calibration = Calibration()
    proposals = Proposals(calibration)
    proposals.build([match([1, 2, 3, 4, 5], length=9)], 5, 0)
    for token in (1, 2, 3):  # the target writes one token a step, and a shorter guess is made in each
        proposals.score([token])
        proposals.build([match([8, 8], length=9)], 2, 0)
    assert (calibration.trials, calibration.hits) == (3, 3)
    proposals.score([7, 5])  # after the first miss, the rest of the chain tells nothing
    assert (calibration.trials, calibration.hits) == (4, 3)
    proposals.build([match([6], length=9)], 1, 0)
    proposals.score([6, 6, 6])
    assert (calibration.trials, calibration.hits) == (5, 4)


# -- rows of both drafters --------------------------------------------------------------------------------------------

DRAFTERS = {
    "lookup": PromptLookup,
    "lookup 2-4": lambda: PromptLookup(2, 4),
    "context": ContextDrafter,
    "context, isolated": lambda: ContextDrafter(isolate=True),
}

IN_TABLE = {f"method {name}": partial(row.drafter, DrafterSettings()) for name, row in METHODS.items() if row.drafter}


@pytest.mark.parametrize("name", DRAFTERS | IN_TABLE)
@given(prompt=TEXTS, answer=TEXTS, data=st.data())
def test_a_row_never_drafts_more_than_asked_nor_cites_what_does_not_stand_there(name, prompt, answer, data):
    row = (DRAFTERS | IN_TABLE)[name]().open(prompt, [(0, len(prompt) // 2)])
    while answer:
        limit = data.draw(st.integers(0, 9))
        draft = row.propose(limit)
        assert len(draft.token_ids) == len(draft.cumulative_acceptance) == len(draft.sources) <= limit
        assert draft.cumulative_acceptance == sorted(draft.cumulative_acceptance, reverse=True)
        assert draft.probabilities is None
        for token, source in zip(draft.token_ids, draft.sources, strict=True):
            assert source is None or prompt[source] == token
        step = data.draw(st.integers(1, 5))
        row.extend(answer[:step])
        answer = answer[step:]
    row.close()


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_stands_in_the_prompt_is_drafted_as_it_stands_there(name):
    passage = list(range(100, 130))
    row = DRAFTERS[name]().open([1, 2, *passage, 3, 4])
    row.extend(passage[:3])
    draft = row.propose(8)
    assert draft.token_ids == passage[3:11]
    assert draft.sources == list(range(5, 13))


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_the_answer_said_before_is_drafted_without_a_source(name):
    row = DRAFTERS[name]().open([1, 2])
    for tokens in ([10, 11], [12, 13, 14], [20, 10], [11, 12]):
        row.extend(tokens)
    draft = row.propose(2)
    assert draft.token_ids == [13, 14]
    assert draft.sources == [None, None]


@pytest.mark.parametrize("name", ["lookup", "context"])
def test_where_no_longer_match_goes_on_a_shorter_one_is_used(name):
    row = DRAFTERS[name]().open([5, 6, 7, 5, 6])
    assert row.propose(3).token_ids == [7, 5, 6]
    row.extend([9, 7])
    assert row.propose(2).token_ids == [5, 6]


@pytest.mark.parametrize("name", DRAFTERS)
def test_nothing_repeated_nothing_drafted(name):
    row = DRAFTERS[name]().open(list(range(50)))
    assert row.propose(8) == Draft()
    row.extend([77])
    assert row.propose(8) == Draft()


@pytest.mark.parametrize("name", DRAFTERS)
def test_asking_twice_gives_the_same_draft(name):
    chooser = random.Random(4)
    text = [chooser.randrange(5) for _ in range(80)]
    row = DRAFTERS[name]().open(text[:40])
    for token in text[40:]:
        assert row.propose(6) == row.propose(6)
        row.extend([token])


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_row_that_was_interrupted_drafts_as_if_it_had_not_been(name):
    text = [n % 7 for n in range(40)]
    whole, again = DRAFTERS[name]().open(text[:20]), DRAFTERS[name]().open(text[:20])
    for token in text[20:]:
        whole.extend([token])
    again.extend(text[20:])
    assert whole.propose(5) == again.propose(5)


@pytest.mark.parametrize(
    ("sizes", "drafted"),
    [((1, 3), [50]), ((1, 1), [60]), ((2, 2), [50]), ((3, 3), []), ((2, 1), [50])],
)
def test_prompt_lookup_goes_by_the_longest_ngram_it_is_allowed(sizes, drafted):
    row = PromptLookup(*sizes).open([1, 2, 50, 9, 2, 60, 1, 2])
    assert row.propose(1).token_ids == drafted


def test_prompt_lookup_takes_the_latest_place():
    row = PromptLookup().open([1, 2, 3, 40, 1, 2, 3, 50, 1, 2, 3])
    assert row.propose(1).token_ids == [50]


# -- context drafter --------------------------------------------------------------------------------------------------

PASSAGE = list(range(200, 240))


def test_other_records_passages_and_answers_are_drafted_from():
    drafter = ContextDrafter()
    first = drafter.open([1, *PASSAGE, 2], [(1, 41)])
    second = drafter.open([3, 4])
    second.extend(PASSAGE[:3])
    assert second.propose(3).token_ids == PASSAGE[3:6]
    assert second.propose(3).sources == [None] * 3

    answer = list(range(300, 320))
    first.extend(answer)
    second.extend(answer[:3])
    assert second.propose(5) == Draft()  # not while it is being written
    first.close()
    assert second.propose(3).token_ids == answer[3:6]


def test_an_isolated_record_drafts_as_if_it_were_the_only_one():
    texts = [[1, *PASSAGE, 2], [*PASSAGE[5:30], 7]]
    alone = ContextDrafter(isolate=True).open([3, *PASSAGE[:4]])
    drafter = ContextDrafter(isolate=True)
    for text in texts:
        row = drafter.open(text, [(0, len(text))])
        row.extend(PASSAGE)
        row.close()
    among = drafter.open([3, *PASSAGE[:4]])
    for token in PASSAGE[:9]:
        assert among.propose(5) == alone.propose(5)
        among.extend([token])
        alone.extend([token])


def test_the_rows_own_long_match_is_not_outvoted_by_other_records():
    drafter = ContextDrafter()
    for n in range(4):
        drafter.pool.add([*PASSAGE[:5], 400, 401, n], OTHER_OUTPUT)
    row = drafter.open([1, *PASSAGE, 2])
    row.extend(PASSAGE[:5])
    assert row.propose(3).token_ids == PASSAGE[5:8]


def test_no_match_crosses_from_one_text_to_the_next():
    pool = SharedPool()
    pool.add([1, 2, 3, 4], 3)
    pool.add([5, 6, 7, 8], 3)
    assert [match.length for match in pool.matches([3, 4, 5])] == [1]  # the 5 alone
    assert pool.matches([2, 3, 4]) == []  # at the end of its text: nothing to go on with
    (found,) = pool.matches([9, 5, 6, 7])
    assert (found.text[found.position], found.length, found.prompt) == (8, 3, False)


@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=12), max_size=8), TEXTS)
def test_matches_in_the_pool_lie_inside_one_text(texts, suffix):
    pool = SharedPool()
    for text in texts:
        pool.add(text, OTHER_OUTPUT)
    whole = [tuple(text) for text in texts]
    for found in pool.matches(suffix):
        assert found.length >= 1
        assert found.position < found.end
        assert any(
            tuple(found.text[found.position - found.length : found.end])
            == text[-(found.end - found.position + found.length) :]
            for text in whole
        )
        assert list(found.text[found.position - found.length : found.position]) == suffix[-found.length :]


def test_a_text_that_comes_again_is_kept_once():
    pool = SharedPool()
    for _ in range(3):
        pool.add(PASSAGE, 3)
    assert len(pool.matches(PASSAGE[:5])) == 1


def test_the_pool_forgets_before_it_outgrows_its_limit(monkeypatch):
    monkeypatch.setattr(context, "SHARED_TOKENS", 100)
    pool = SharedPool()
    for n in range(30):
        pool.add([1000 + 10 * n + i for i in range(10)], 3)
        assert len(pool) <= 100
        assert pool.matches([1000 + 10 * n + i for i in range(5)])
    assert not pool.matches([1000 + i for i in range(5)])
    pool.add([1000 + i for i in range(10)], 3)  # what was forgotten is not known any more
    assert pool.matches([1000 + i for i in range(5)])


def test_a_text_longer_than_the_pool_is_cut(monkeypatch):
    monkeypatch.setattr(context, "SHARED_TOKENS", 100)
    pool = SharedPool()
    pool.add(range(1000), OTHER_OUTPUT)
    assert len(pool) == 100
    assert pool.matches([50, 51, 52])
