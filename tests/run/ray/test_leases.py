import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.records import Passage, Record
from ragspec.run.answering import RecordTask
from ragspec.run.ray.driver import HEAD, group_of, size_of
from ragspec.run.ray.leases import DEATH, SILENCE, Leases


def asked(index):
    return RecordTask(index, f"key {index}", index + 1, Record(str(index), prompt=f"p {index}"))


def lines(leased):
    return [each.index for each in leased]


def filled(groups):
    leases = Leases()
    for index, group in enumerate(groups):
        leases.add(asked(index), group.encode() if group else None, size=10)
    return leases


def test_records_of_a_group_go_to_one_worker_and_others_to_whoever_asks():
    leases = filled(["a", "b", "a", "", "b", "a", ""])
    assert lines(leases.take("one", 3)) == [0, 2, 5]
    assert lines(leases.take("two", 2)) == [1, 4]
    leases.add(asked(7), b"b")
    leases.add(asked(8), b"a")
    assert lines(leases.take("two", 9)) == [7, 3, 6]  # its own group first
    assert lines(leases.take("one", 9)) == [8]
    assert (leases.waiting, leases.out) == (0, 9)


def test_what_belongs_to_no_group_keeps_its_turn_among_groups():
    leases = filled(["", "a", "", "a", "b"])
    assert lines(leases.take("one", 3)) == [0, 1, 3]
    assert lines(leases.take("one", 3)) == [2, 4]


def test_an_idle_worker_takes_half_of_the_others_fullest_group_and_is_its_home_too():
    leases = filled(["a"] * 9 + ["b"] * 2)
    assert lines(leases.take("one", 1)) == [0]
    leases.take("one", 0)
    assert lines(leases.take("two", 9)) == [9, 10]  # nobody's, before another's
    assert lines(leases.take("two", 9)) == [1, 2, 3, 4]
    assert lines(leases.take("two", 9)) == [5, 6, 7, 8]


def test_only_what_a_worker_has_can_be_settled_and_late_answers_are_not():
    leases = filled(["", ""])
    leases.take("one", 2)
    assert leases.settle("one", 0)
    assert not leases.settle("one", 0)
    assert not leases.settle("two", 1)
    assert leases.mark_dead("one", DEATH) == []
    assert not leases.settle("one", 1)
    assert lines(leases.take("two", 9)) == [1]
    assert leases.settle("two", 1)
    assert (leases.waiting, leases.out, leases.size, leases.oldest) == (0, 0, 0, None)


def test_the_oldest_line_is_the_first_without_an_answer():
    leases = filled([""] * 3)
    leases.take("one", 3)
    assert leases.oldest == 0
    leases.settle("one", 1)
    assert leases.oldest == 0
    leases.settle("one", 0)
    assert leases.oldest == 2


def test_a_record_that_kills_two_workers_is_found_and_nothing_else_is_blamed():
    poison, total = {3, 17}, 24
    leases, finished, deaths = filled([""] * total), set(), 0
    poisonous = []
    for life in range(100):
        name = f"worker {life}"
        while got := leases.take(name, 8):
            killers = [each for each in got if each.index in poison]
            if killers:  # those before it are answered, the rest dies with it
                for each in got[: got.index(killers[0])]:
                    assert leases.settle(name, each.index)
                    finished.add(each.index)
                deaths += 1
                poisonous += lines(leases.mark_dead(name, DEATH))
                break
            for each in got:
                assert leases.settle(name, each.index)
                finished.add(each.index)
        if not leases.waiting and not leases.out:
            break
    assert sorted(poisonous) == sorted(poison)
    assert finished == set(range(total)) - poison
    assert deaths == 2 * len(poison)


def test_a_machine_that_vanishes_makes_nobody_suspicious():
    leases = filled([""] * 4)
    for life in range(5):
        assert len(leases.take(f"worker {life}", 9)) == 4
        assert leases.mark_dead(f"worker {life}", 0) == []
    assert lines(leases.take("last", 9)) == [0, 1, 2, 3]


def test_silence_convicts_only_when_it_comes_again_and_again():
    leases = filled([""])
    for life in range(3):
        assert len(leases.take(f"worker {life}", 9)) == 1
        assert leases.mark_dead(f"worker {life}", SILENCE) == []
    leases.take("last", 9)
    assert lines(leases.mark_dead("last", SILENCE)) == [0]
    assert (leases.waiting, leases.out) == (0, 0)


def test_suspects_are_leased_one_at_a_time_to_a_worker():
    leases = filled([""] * 4)
    leases.take("one", 3)
    leases.mark_dead("one", DEATH)
    assert lines(leases.take("two", 9)) == [0, 3]
    assert leases.take("two", 9) == []
    assert lines(leases.take("three", 9)) == [1]
    leases.settle("two", 0)
    assert lines(leases.take("two", 9)) == [2]


def test_what_is_given_back_comes_first():
    leases = filled(["", "a", "", ""])
    leases.take("one", 3)
    leases.give_back("one", [1, 2, 99])
    assert (leases.waiting, leases.out, leases.held("one")) == (3, 1, 1)
    assert lines(leases.take("two", 9)) == [2, 3]  # a group's records stay at home as long as there are others
    assert lines(leases.take("two", 9)) == [1]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 60))
def test_whatever_happens_every_record_is_settled_exactly_once(seed, workers, total):
    chance = random.Random(seed)
    groups = [chance.choice(["", "a", "b", "c"]) for _ in range(total)]
    leases, names, held, settled = filled(groups), [f"worker {n}" for n in range(workers)], {}, []
    for _ in range(20 * total):
        name = chance.choice(names)
        what = chance.random()
        if what < 0.4:
            held.setdefault(name, []).extend(lines(leases.take(name, chance.randrange(1, 9))))
        elif what < 0.8 and held.get(name):
            index = held[name].pop(chance.randrange(len(held[name])))
            assert leases.settle(name, index)
            settled.append(index)
        elif what < 0.9 and held.get(name):
            leases.give_back(name, [held[name].pop()])
        elif what > 0.97:
            held.pop(name, None)
            settled += lines(leases.mark_dead(name, chance.choice([0, SILENCE, DEATH])))
    for name in names:
        for index in held.get(name, ()):
            assert leases.settle(name, index)
            settled.append(index)
    while got := leases.take("last", 5):
        for each in got:
            assert leases.settle("last", each.index)
            settled.append(each.index)
    assert sorted(settled) == list(range(total))
    assert (leases.waiting, leases.out, leases.size) == (0, 0, 0)


@pytest.mark.parametrize(
    ("one", "two", "together"),
    [
        ({"contexts": (Passage("1", "t"),), "query": "a"}, {"contexts": (Passage("9", "t"),), "query": "b"}, True),
        ({"contexts": (Passage("1", "t"),)}, {"contexts": (Passage("1", "u"),)}, False),
        ({"prompt": "x" * HEAD + "one"}, {"prompt": "x" * HEAD + "two"}, True),
        ({"prompt": (1,) * 300}, {"prompt": (*(1,) * 299, 2)}, True),
        (
            {"messages": ({"role": "system", "content": "x" * HEAD}, {"role": "user", "content": "a"})},
            {"messages": ({"role": "system", "content": "x" * HEAD}, {"role": "user", "content": "b"})},
            True,
        ),
    ],
)
def test_records_that_begin_alike_are_one_group(one, two, together):
    first, second = group_of(Record("1", **one)), group_of(Record("2", **two))
    assert first is not None
    assert (first == second) is together


def test_a_short_prompt_shares_nothing_worth_a_worker():
    assert group_of(Record("1", prompt="short")) is None
    assert group_of(Record("1", query="short")) is None
    assert group_of(Record("1", messages=({"role": "user", "content": "short"},))) is None


def test_a_record_is_as_large_as_its_texts():
    assert size_of(Record("1", query="q", contexts=(Passage("1", "abc"), Passage("2", "de")))) == 5
    assert size_of(Record("1", prompt="abcd", prompts=("ef", (1, 2, 3)))) == 9
    assert size_of(Record("1", messages=({"role": "user", "content": "abc"},))) == 3
