"""How vLLM's own drafts are judged, in steps of an engine that keeps its own time."""

from collections import namedtuple
from types import SimpleNamespace

import pytest

from ragspec.runners.vllm.patches import guarded_drafts as guarded
from ragspec.runners.vllm.patches.guarded_drafts import BLIND, GuardedProposer
from ragspec.runners.vllm.patches.steps import drop_unproposed

ROWS, TOKENS = 4, 3
PLAIN, VERIFIED = 1.0, 0.1  # seconds of a plain step, and more for each token of a draft
Drafted = namedtuple("Drafted", "req_ids draft_token_ids")


class Engine:
    """Steps as vLLM 0.32 takes them. right: tokens of each draft that are accepted. drafting: seconds of a draft."""

    def __init__(self, monkeypatch, *, right, drafting, reads=True, greedy=True, pauses=True):
        self.now, self.right, self.drafting = 0.0, right, drafting
        self.drafts = {name: [] for name in "abcd"}
        self.ran, self.verified, self.written, self.room = 0, 0, 0, True
        monkeypatch.setattr(guarded.time, "perf_counter", lambda: self.now)
        spec = SimpleNamespace(use_eagle=lambda: False, uses_draft_model=lambda: reads)
        self.runner = SimpleNamespace(
            speculative_config=spec,
            input_batch=SimpleNamespace(sampling_metadata=SimpleNamespace(all_greedy=greedy)),
            execute_model=self.execute,
            sample_tokens=self.sample,
            propose_draft_token_ids=self.propose,
            _input_fits_in_drafter=lambda metadata: self.room,
        )
        self.scheduler = SimpleNamespace(update_draft_token_ids=self.update)
        self.guarded = GuardedProposer(SimpleNamespace(scheduler=self.scheduler), self.runner, pauses=pauses)

    def run(self, steps, prompts=0):
        for _ in range(steps):
            tokens = {name: 1 + len(draft) + prompts for name, draft in self.drafts.items()}
            drafts = {name: draft for name, draft in self.drafts.items() if draft}
            self.runner.execute_model(
                SimpleNamespace(num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=drafts), None
            )
            self.runner.sample_tokens(None)
        return self

    def execute(self, scheduled, intermediate):
        drafted = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        self.now += PLAIN + VERIFIED * drafted
        self.verified += drafted

    def sample(self, grammar):
        ids = [[7] * (1 + min(len(draft), self.right)) for draft in self.drafts.values()]
        self.written += sum(map(len, ids))
        drafts = [[0] * TOKENS] * ROWS  # what vLLM hands on where its drafter has no room
        if self.runner._input_fits_in_drafter("metadata"):
            drafts = self.runner.propose_draft_token_ids("hidden states")
        self.scheduler.update_draft_token_ids(Drafted(list(self.drafts), drafts))
        return SimpleNamespace(sampled_token_ids=ids)

    def propose(self, hidden):
        self.now += self.drafting
        self.ran += 1
        return [[5] * TOKENS] * ROWS

    def update(self, drafted):
        self.drafts = dict(zip(drafted.req_ids, map(list, drafted.draft_token_ids), strict=True))


def test_drafts_that_lose_are_paused_and_their_model_rests(monkeypatch):
    engine = Engine(monkeypatch, right=0, drafting=0.5).run(600)
    assert engine.now / engine.written < 1.05 * PLAIN / ROWS
    assert engine.ran < 60
    found = engine.guarded.about()["guard"]
    assert found["ratio"] == pytest.approx(PLAIN / (PLAIN + 12 * VERIFIED + 0.5), abs=0.02)
    assert found["paused_steps"] > 500
    assert "draft_model: steps with drafts were clearly slower than plain ones" in engine.guarded.note("draft_model")


def test_drafts_that_win_go_on_and_their_model_misses_nothing(monkeypatch):
    engine = Engine(monkeypatch, right=TOKENS, drafting=0.1).run(600)
    assert engine.ran == 600
    assert engine.now / engine.written < 0.65 * PLAIN / ROWS
    found = engine.guarded.about()["guard"]
    assert found["ratio"] == pytest.approx(4 / (PLAIN + 12 * VERIFIED + 0.1), abs=0.05)
    assert 2 < found["plain_steps"] < 30
    assert engine.guarded.note("draft_model") == ""


def test_drafts_of_a_length_that_was_asked_for_are_judged_and_not_paused(monkeypatch):
    engine = Engine(monkeypatch, right=0, drafting=0.5, pauses=False).run(600)
    assert engine.ran == 600
    assert engine.verified > 0.9 * 600 * ROWS * TOKENS
    assert "leave out num_tokens" in engine.guarded.note("draft_model")


def test_a_drafter_without_a_model_goes_on_and_its_drafts_are_dropped(monkeypatch):
    engine = Engine(monkeypatch, right=0, drafting=0.001, reads=False).run(600)
    assert engine.ran == 600
    assert engine.verified < 0.1 * 600 * ROWS * TOKENS


def test_text_that_is_sampled_does_not_depend_on_a_clock(monkeypatch):
    engine = Engine(monkeypatch, right=0, drafting=0.5, greedy=False).run(100)
    assert engine.verified == 99 * ROWS * TOKENS


def test_steps_that_compute_prompts_teach_nothing_and_do_not_draft_at_first(monkeypatch):
    engine = Engine(monkeypatch, right=0, drafting=0.5).run(BLIND, prompts=50)
    assert engine.verified == 0
    assert engine.ran == BLIND, "its keys and values have no gap"
    engine.run(100, prompts=50)
    assert engine.verified == 99 * ROWS * TOKENS
    assert engine.guarded.about()["guard"]["ratio"] is None


def test_steps_that_compute_prompts_draft_once_drafts_have_shown_what_they_are_worth(monkeypatch):
    engine = Engine(monkeypatch, right=TOKENS, drafting=0.1).run(20)
    verified = engine.verified
    engine.run(10, prompts=50)
    assert engine.verified == verified + 10 * ROWS * TOKENS


def test_drafts_of_a_length_that_was_asked_for_wait_for_nothing(monkeypatch):
    engine = Engine(monkeypatch, right=0, drafting=0.5, pauses=False).run(10, prompts=50)
    assert engine.verified == 9 * ROWS * TOKENS


def test_a_drafter_without_room_is_not_asked(monkeypatch):
    engine = Engine(monkeypatch, right=0, drafting=0.5)
    engine.room = False
    assert engine.run(20).ran == 0


def test_what_a_drafter_without_room_leaves_is_not_verified(monkeypatch):
    engine = Engine(monkeypatch, right=0, drafting=0.5)
    engine.room = False
    assert engine.run(20).verified == 19 * ROWS * TOKENS, "vLLM's zeros"
    drop_unproposed(engine.scheduler, engine.runner)
    before = engine.run(1).verified
    assert engine.run(20).verified == before
    engine.room = True
    assert engine.run(20).verified > before


def test_every_run_starts_afresh(monkeypatch):
    engine = Engine(monkeypatch, right=0, drafting=0.5).run(200)
    engine.guarded.reset()
    assert engine.guarded.about()["guard"] == {
        "ratio": None,
        "ratio_asked": None,
        "ratio_asked_beside": None,
        "pauses": 0,
        "paused_steps": 0,
        "plain_steps": 0,
    }
