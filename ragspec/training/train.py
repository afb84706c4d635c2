"""`ragspec train-draft`: answers, lessons, a draft, and whether it pays here.

DIR/answers.jsonl   the target's answers, resumed as any run
DIR/state.pt        how far the draft has learnt
DIR/draft           the draft: `speculation: {method: draft_model, draft_model: DIR/draft}`
DIR/check           the benchmark on the records that were held out
DIR/draft.json      what was found
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ragspec.benchmark.measure import run_benchmark
from ragspec.benchmark.plan import make_plan
from ragspec.benchmark.results import SPEED, Ratio
from ragspec.config.load import build_config
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.outputs.documents import write_json
from ragspec.runners.huggingface.args import Args
from ragspec.runners.huggingface.checkpoint import Checkpoint
from ragspec.training.lessons import Lessons, answer, without_draft, write_held_out

if TYPE_CHECKING:
    from ragspec.training.distil import Progress

DRAFT, FOUND, CHECK = "draft", "draft.json", "check"
LOADED = ("device", "num_gpus", "revision", "trust_remote_code", "model_args", "tokenizer_args")
PASSES = 3
CHECKED = 32  # records of the check, at most


def unheard(done: int, steps: int, loss: float) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What became of it. before, after: share of held-out tokens that the draft guesses.

    acceptance: of its drafts in a run over them. ratio: of that run's speed to one without drafts; low, high: its
    interval.
    """

    draft: str
    layers: int
    lessons: int
    tokens: int
    before: float
    after: float
    training_s: float
    acceptance: float | None
    ratio: float | None
    low: float | None
    high: float | None

    @property
    def pays(self) -> bool:
        """Whether runs with the draft are faster here, beyond doubt."""
        return self.ratio is not None and self.ratio > 1 and (self.low is None or self.low > 1)

    def verdict(self) -> str:
        """Return what to do with it, in a sentence."""
        if self.ratio is None:
            return "it was not timed"
        span = "" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})"
        if self.pays:
            return f"it pays on this machine: {self.ratio:.2f}x{span} of no drafts, end to end"
        return f"it does not pay on this machine: {self.ratio:.2f}x{span} of no drafts; leave method as it was"


def train_draft(
    config: RunConfig,
    folder: Path,
    *,
    layers: int,
    epochs: int,
    limit: int | None,
    console: Console,
    progress: Progress = unheard,
) -> Trained:
    """Teach a draft of `layers` layers and measure it. Raises ConfigError and ModelError.

    progress: called after every step of learning, with those done, all of them, and the loss.
    """
    plain = without_draft(config)
    check_form(plain)
    console.print("the target answers the records ...")
    lessons = answer(plain, folder, limit)
    started = time.monotonic()
    before, after = _taught(plain, lessons, folder, layers, epochs, progress)
    spent = time.monotonic() - started
    console.print(f"held-out tokens guessed: {before:.1%} before, {after:.1%} after", markup=False)
    ratio, acceptance = _check(plain, lessons, folder, console)
    trained = Trained(
        str(folder / DRAFT),
        layers,
        len(lessons.taught),
        lessons.tokens,
        before,
        after,
        spent,
        acceptance,
        ratio.median if ratio else None,
        ratio.low if ratio else None,
        ratio.high if ratio else None,
    )
    write_json(folder / FOUND, asdict(trained) | {"pays": trained.pays, "verdict": trained.verdict()})
    return trained


def check_form(config: RunConfig) -> None:
    """Raise ConfigError for a target that transformers cannot load as it is."""
    if config.model is None or config.runner == "fake":
        raise ConfigError("model: train-draft needs a model that transformers loads")


def _taught(
    config: RunConfig, lessons: Lessons, folder: Path, layers: int, epochs: int, progress: Progress
) -> tuple[float, float]:
    """Cut a draft from the target and teach it; return what it guessed before and what it guesses after."""
    from ragspec.training.distil import agreement, teach
    from ragspec.training.pupil import cut_from

    target = _target(config)
    pupil = cut_from(target.load(), layers)
    before = agreement(pupil, lessons.held_out)
    teach(pupil, lessons.taught, epochs, folder, progress)
    pupil.save_pretrained(folder / DRAFT, safe_serialization=True)
    target.tokenizer.inner.save_pretrained(folder / DRAFT)
    return before, agreement(pupil, lessons.held_out)


def _target(config: RunConfig) -> Checkpoint:
    """Return the target in transformers, to be loaded in float32, in which a draft learns."""
    given = {key: value for key, value in config.runner_args.items() if key in LOADED}
    return Checkpoint(config.model or "", Args.model_validate(given | {"dtype": "float32"}))


def _check(config: RunConfig, lessons: Lessons, folder: Path, console: Console) -> tuple[Ratio | None, float | None]:
    """Time runs over the held-out records with the draft and without any, in turn."""
    path = write_held_out(config, lessons, folder)
    raw = config.model_dump() | {
        "input": str(path),
        "speculation": {"method": "draft_model", "draft_model": str(folder / DRAFT)},
    }
    plan = make_plan(build_config(raw, "train-draft"), ["none", "draft_model"])
    results = run_benchmark(plan, folder / CHECK, repeat=PASSES, limit=CHECKED, sequential=False, console=console)
    ratio = next((each for each in results.ratios if each.metric == SPEED), None)
    run = next((run for run in results.runs if run.name == "draft_model"), None)
    return ratio, run.acceptance_rate if run else None
