"""The watch: every second of a forward in one part, bounds by hand, and nothing left behind."""

from types import SimpleNamespace

import pytest
import torch

from ragspec.engine import profiler
from ragspec.engine.model.forward import Model
from ragspec.engine.model.kv_splits import PrefixGroup
from ragspec.engine.model.layout import Segment
from ragspec.engine.native.kernels import build
from ragspec.engine.profiler import ATTENTION, DECODING, LINEAR, PROMPTS, Clock, Profiler, StepTimer
from ragspec.host.compiler import Unbuilt
from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.step_cost import StepCost
from tests.engine.test_linear import llama

WEIGHTS = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 300 * 32  # of the linear layers of llama()
SLOT = 2 * 2 * 8 * 4  # bytes of a token's keys and values in a layer


@pytest.fixture
def model():
    try:
        kernels = build(8)
    except Unbuilt:
        kernels = None
    return Model(llama(), 3, kernels)


def test_every_second_is_in_one_part(model):
    with Profiler(model, 1e9, 1e9) as watch:
        model.logits([Segment(0, 0, 40, alone=True)], range(40), [39])
        model.logits([Segment(0, 40, 1), Segment(1, 0, 3, alone=True)], [1, 2, 3, 4], [0, 3])
        model.logits([Segment(0, 41, 1)], [5], [0])
    found = watch.to_json()
    assert [found[phase]["steps"] for phase in (PROMPTS, DECODING)] == [2, 1]
    for phase in found.values():
        seconds = [part["seconds"] for part in phase["parts"].values()]
        assert len(seconds) == 3
        assert min(seconds) > 0
        assert sum(seconds) == pytest.approx(phase["seconds"])


def test_bounds_are_bytes_or_arithmetic_whichever_is_more(model):
    model.logits([Segment(row, 0, 10, alone=True) for row in range(3)], [*range(10)] * 3, [9])
    work = [Segment(row, 10, 1) for row in range(3)], [1, 2, 3], [0, 1, 2], [PrefixGroup(0, {1: 10, 2: 10})]
    by_bytes, by_arithmetic = Profiler(model, 1.0, 1e30), Profiler(model, 1e30, 1.0)
    for watch in (by_bytes, by_arithmetic):
        with watch:
            model.logits(*work)
    parts = by_bytes.to_json()[DECODING]["parts"]
    assert parts[LINEAR]["bound_s"] == 4 * WEIGHTS
    assert parts[ATTENTION]["bound_s"] == 2 * SLOT * (11 + 1 + 1)
    parts = by_arithmetic.to_json()[DECODING]["parts"]
    assert parts[LINEAR]["bound_s"] == pytest.approx(3 * 2 * WEIGHTS)
    assert parts[ATTENTION]["bound_s"] == 2 * 4 * 4 * 8 * 3 * 11


def test_nothing_is_left_behind_and_nothing_changes(model):
    work = [Segment(0, 0, 20, alone=True)], [*range(20)], [19]
    before = model.logits(*work)
    with Profiler(model, 1e9, 1e9) as watch:
        assert torch.equal(model.logits(*work), before)
    steps = watch.to_json()[PROMPTS]["steps"]
    assert torch.equal(model.logits(*work), before)
    assert watch.to_json()[PROMPTS]["steps"] == steps == 1
    assert model.watch is None
    assert not any(module._forward_hooks for module in model.inner.modules() if type(module) is torch.nn.Linear)


@pytest.mark.parametrize("overlapped", [False, True])
def test_drafting_is_parted_into_what_a_step_waits_for_and_what_is_done_beside_it(overlapped, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(profiler.time, "perf_counter", lambda: now[0])
    clock, cost = Clock(), StepCost([(1, 4.0)])
    timer = StepTimer()
    now[0] += 4
    timer.planned(3)
    now[0] += 1
    with timer.settling(overlapped):
        now[0] += 2
    now[0] += 1
    row = SimpleNamespace(tokens=[1, 2])
    item = SimpleNamespace(row=row, token_ids=[1], draft=Draft(), decodes=True)
    seconds = timer.count([item], 1, clock, cost)
    assert (clock.drafting_s, clock.drafting_overlapped_s) == ((3, 2) if overlapped else (5, 0))
    assert timer.settling_s == (0 if overlapped else 2)
    assert (seconds, clock.decode_s) == (8, 8)
    # beside a device, settling is part of the forward's 4 s; alone, the forward took 2
    assert (cost(1, 1, 0) < 4.0) == (not overlapped)
