"""What may change answers: tried, told with its quality, and chosen only within the loss that is allowed."""

import contextlib
import dataclasses

import pytest
import yaml
from rich.console import Console

from ragspec.benchmark.frontier import Point, allowed, frontier, points, variants
from ragspec.benchmark.plan import Candidate
from ragspec.benchmark.results import Quality
from ragspec.benchmark.tune import tune
from ragspec.config.load import build_config
from ragspec.errors import ConfigError, ModelError
from ragspec.quality.bootstrap import Estimate
from tests import warm
from tests.conftest import SAMPLE, write_jsonl

WINNER = Candidate("context", build_config({"model": "m", "runner": "vllm", "input": "x", "sampling": {"n": 2}}))


def named(name):
    return Candidate(name, WINNER.config)


def quality(mean, low=None, high=None):
    apart = {} if low is None else {"f1": Estimate((low + high) / 2, low, high, 50)}
    return Quality({"f1": Estimate(mean, mean - 2, mean + 2, 50)}, "context" if apart else None, apart)


def test_variants_change_what_they_say_and_nothing_else():
    found = {each.name: each.config for each in variants(WINNER, ("order", "passages", "dtype"), 8, on_gpu=True)}
    assert list(found) == ["context-shared-order", "context-6-passages", "context-4-passages", "context-bfloat16"]
    assert found["context-shared-order"].prompt.order == "shared"
    assert found["context-4-passages"].prompt.max_passages == 4
    assert found["context-bfloat16"].runner_args["dtype"] == "bfloat16"
    assert all(config.sampling.n == 2 for config in found.values())
    assert variants(WINNER, ("passages",), 1, on_gpu=False) == []
    assert variants(WINNER, ("quantization",), 4, on_gpu=False) == []
    assert variants(WINNER, ("quantization",), 4, on_gpu=True)[0].config.runner_args["quantization"] == "fp8"


def test_points_are_ratios_of_passes_in_turn():
    speeds = {"context": [10.0, 20.0, 10.0], "a": [15.0, 30.0, 14.0], "b": [None]}
    found = points(WINNER, [named("a"), named("b")], speeds, {"context": quality(40.0)})
    assert found[1].speed == "1.50x (1.33 to 1.62)"
    assert found[1].low == pytest.approx(1.33, abs=0.01)
    assert [(point.candidate.name, point.ratio, point.lossless) for point in found] == [
        ("context", 1.0, True),
        ("a", 1.5, False),
    ]


GIVEN = [
    Point(named("lossless"), 1.0, quality(40.0), lossless=True),
    Point(named("sure"), 1.3, quality(39.9, -0.8, 0.6), low=1.2, speed="1.30x (1.20 to 1.40)"),
    Point(named("unsure"), 1.6, quality(39.0, -3.0, 1.0), low=1.5),
    Point(named("worse"), 1.2, quality(39.0, -1.5, -0.5), low=1.1),
    Point(named("unknown"), 9.0, None, low=8.0),
    Point(named("chance"), 1.5, quality(38.0, -0.1, 0.2), low=0.9),
]


@pytest.mark.parametrize(
    ("max_loss", "chosen"), [(None, "lossless"), (0.0, "lossless"), (1.0, "sure"), (3.0, "unsure"), (99.0, "unsure")]
)
def test_nothing_lossy_is_chosen_unasked_nor_beyond_its_loss(max_loss, chosen):
    assert allowed(GIVEN, max_loss).candidate.name == chosen


def test_the_frontier_is_what_nothing_else_beats_in_both():
    assert [point.candidate.name for point in frontier(GIVEN)] == ["lossless", "sure", "unsure", "unknown"]
    told = "sure: 1.30x (1.20 to 1.40), F1 39.9 (37.9 to 41.9), -0.1 (-0.8 to +0.6) against the lossless one"
    assert GIVEN[1].told(best=True) == f"{told}; changes answers, on the frontier"
    assert GIVEN[0].told(best=False).endswith("; lossless")


def test_without_references_nothing_lossy_is_tried(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": "q", "query": "?", "contexts": ["a", "b"]}])
    config = build_config({"model": "m", "input": source})
    with pytest.raises(ConfigError, match="the records need a `reference`"):
        tune(config, tmp_path, budget_s=1, limit=4, console=None, tries=("order",))
    with pytest.raises(ConfigError, match=r'--try: "ordr" is not known; did you mean "order"'):
        tune(config, tmp_path, budget_s=1, limit=4, console=None, tries=("ordr",))


@pytest.mark.wide
def test_tune_shows_the_frontier_and_stays_lossless(tiny, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {tiny}\nrunner: huggingface\ninput: {SAMPLE}\nsampling: {{max_new_tokens: 8}}\n"
        "prompt: {max_prompt_tokens: 500}"
    )
    out = tmp_path / "tuned.yaml"
    tries = ["--try", "order", "--try", "passages"]
    done = warm.ragspec(tmp_path, "tune", "-c", config, "--limit", 4, "--budget", 2, *tries, "-o", out)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert "-shared-order: " in text
    assert "; lossless" in text
    assert "changes answers" in text
    chosen = yaml.safe_load(text)
    assert "order" not in chosen.get("prompt", {})
    assert "max_passages" not in chosen.get("prompt", {})


@pytest.mark.long
def test_what_cannot_be_tried_costs_nothing_but_itself(tiny, tmp_path, monkeypatch):
    """One variant does not start, another loses records; the winner is written all the same."""
    from ragspec.benchmark import tune as module

    row = {"query": "why?", "contexts": ["a", "b", "c", "d"], "reference": "x"}
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": f"q{i}", **row} for i in range(4)])
    raw = {"model": tiny, "runner": "huggingface", "input": str(source), "sampling": {"max_new_tokens": 4}}
    right = module.open_worker

    class Losing:
        def __init__(self, worker):
            self.candidate, self.answers, self._worker = worker.candidate, worker.answers, worker

        def measure(self):
            figures = self._worker.measure()
            return dataclasses.replace(figures, failed=3, generate_s=figures.generate_s / 100)

    @contextlib.contextmanager
    def opened(candidate, folder, limit, console):
        if candidate.name.endswith("-3-passages"):
            raise ModelError("no room for it")
        with right(candidate, folder, limit, console) as worker:
            yield Losing(worker) if candidate.name.endswith("-shared-order") else worker

    monkeypatch.setattr(module, "open_worker", opened)
    tuned = tune(
        build_config(raw),
        tmp_path,
        budget_s=1,
        limit=4,
        console=Console(quiet=True),
        tries=["order", "passages"],
        max_loss=100.0,
    )
    lines = "\n".join(tuned.evidence)
    assert "-3-passages: ruled out: no room for it" in lines
    assert "-shared-order: ruled out: 3 records failed" in lines
    assert not tuned.winner.name.endswith(("-3-passages", "-shared-order"))


def test_a_loss_that_nothing_may_have_is_refused(tiny, tmp_path):
    config = build_config({"model": tiny, "input": write_jsonl(tmp_path / "in.jsonl", [{"query": "why?"}])})
    with pytest.raises(ConfigError, match="--max-loss: says what --try may lose"):
        tune(config, tmp_path, budget_s=1, limit=1, console=Console(quiet=True), max_loss=1.0)
