"""`ragspec train-draft`: answers, lessons, a draft or a head, and whether it pays here.

DIR/answers.jsonl   the target's answers, resumed as any run
DIR/state.pt        how far the draft has learnt
DIR/draft           what was taught: `speculation: {method: draft_model, draft_model: DIR/draft}`
DIR/check           the benchmark on the records that were held out
DIR/draft.json      what was found
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console

from ragspec.benchmark.measure import run_benchmark
from ragspec.benchmark.plan import make_plan
from ragspec.benchmark.results import SPEED, Ratio
from ragspec.config.load import build_config
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError, ModelError
from ragspec.models.memory import free_memory
from ragspec.outputs.folder import write_json
from ragspec.runners.huggingface.args import Args
from ragspec.runners.huggingface.checkpoint import Checkpoint
from ragspec.training.examples import ExampleSplit, answer, check_records, without_draft, write_held_out
from ragspec.training.heads import Head, check_head
from ragspec.training.student import Progress, Student, Trainable, check_layers, cut_student, distill

DRAFT_MODEL = "draft_model"
METHODS = (DRAFT_MODEL, "eagle3", "dflash")
LAYERS = 2  # of a draft model, where nobody says how many
DRAFT, FOUND, CHECK = "draft", "draft.json", "check"
LOADED = ("device", "num_gpus", "revision", "trust_remote_code", "model_args", "tokenizer_args")
PASSES = 3
CHECKED = 32  # records of the check, at most


def ignore_note(done: int, steps: int, loss: float) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What became of it. method: that runs it. before, after: share of held-out tokens that the draft guesses.

    acceptance: of its drafts in a run over them. ratio: of that run's speed to one without drafts; low, high: its
    interval. untimed: why there was no such run.
    """

    method: str
    draft: str
    examples: int
    tokens: int
    before: float
    after: float
    training_s: float
    acceptance: float | None
    ratio: float | None
    low: float | None
    high: float | None
    untimed: str = ""

    @property
    def pays(self) -> bool | None:
        """Whether runs with the draft are faster here; None where the runs do not tell."""
        if self.low is None or self.high is None or self.low <= 1 <= self.high:
            return None
        return self.low > 1

    def verdict(self) -> str:
        """Return what to do with it, in a sentence."""
        if self.ratio is None:
            return f"it was not timed: {self.untimed or 'no run came to its end'}"
        span = "one pass" if self.low is None else f"{self.low:.2f} to {self.high:.2f}"
        speed = f"{self.ratio:.2f}x ({span}) the speed without drafts"
        if self.pays is None:
            return (
                f"whether it pays cannot be told: {speed}, which may be chance; compare on more records: ragspec "
                f"benchmark --method none --method {self.method} --repeat 9"
            )
        if self.pays:
            return f"it pays on this machine: {speed}, end to end"
        return f"it does not pay on this machine: {speed}; leave method as it was"


def train_draft(
    config: RunConfig,
    folder: Path,
    *,
    method: str = DRAFT_MODEL,
    layers: int | None = None,
    epochs: int,
    limit: int | None,
    console: Console,
    progress: Progress = ignore_note,
) -> Trained:
    """Teach a draft of `layers` layers (None: as many as its method has) and measure it.

    progress: called after every step of learning, with those done, all of them, and the loss. Raises ConfigError and
    ModelError.
    """
    plain = without_draft(config)
    target = _target(plain, method, layers)
    check_records(plain)
    console.print("the target answers the records ...")
    examples = answer(plain, folder, limit)
    started = time.monotonic()
    before, after = _taught(_learner(target, method, layers, examples), examples, folder, epochs, progress)
    target.forget()
    free_memory()
    spent = time.monotonic() - started
    console.print(f"held-out tokens guessed: {before:.1%} before, {after:.1%} after", markup=False)
    ratio, acceptance, untimed = _check(plain, method, examples, folder, console)
    trained = Trained(
        method,
        str(folder / DRAFT),
        len(examples.taught),
        examples.tokens,
        before,
        after,
        spent,
        acceptance,
        ratio.median if ratio else None,
        ratio.low if ratio else None,
        ratio.high if ratio else None,
        untimed,
    )
    write_json(folder / FOUND, asdict(trained) | {"pays": trained.pays, "verdict": trained.verdict()})
    return trained


def _target(config: RunConfig, method: str, layers: int | None) -> Checkpoint:
    """Return the target in transformers, to be loaded in float32, in which a draft learns.

    Raises ConfigError where it cannot be loaded so, or cannot have such a draft.
    """
    if method not in METHODS:
        raise ConfigError(f'--method: "{method}" cannot be trained; one of {", ".join(METHODS)}')
    if config.model is None or config.runner == "fake":
        raise ConfigError("model: train-draft needs a model that transformers loads")
    given = {key: value for key, value in config.runner_args.items() if key in LOADED}
    target = Checkpoint(config.model, Args.model_validate(given | {"dtype": "float32"}))
    if method == DRAFT_MODEL:
        check_layers(layers or LAYERS, target.config.get_text_config().num_hidden_layers)
    else:
        check_head(method, target)
    return target


def _learner(target: Checkpoint, method: str, layers: int | None, examples: ExampleSplit) -> Trainable:
    """Load the target, and return the draft that is made of it."""
    if method != DRAFT_MODEL:
        return Head(method, target, target.load(), layers, examples.taught)
    dtype = getattr(target.config, "dtype", None) or torch.float32
    return Student(cut_student(target.load(), layers or LAYERS), target.tokenizer.inner, dtype)


def _taught(
    learner: Trainable, examples: ExampleSplit, folder: Path, epochs: int, progress: Progress
) -> tuple[float, float]:
    """Teach a draft and write it; return what it guessed before and what it guesses after."""
    before = learner.agreement(examples.held_out)
    distill(learner, examples.taught, epochs, folder, progress)
    learner.save(folder / DRAFT)
    return before, learner.agreement(examples.held_out)


def _check(
    config: RunConfig, method: str, examples: ExampleSplit, folder: Path, console: Console
) -> tuple[Ratio | None, float | None, str]:
    """Time runs over the held-out records with the draft and without any, in turn; or say why there were none."""
    if method != DRAFT_MODEL and find_spec("vllm") is None:
        return None, None, "vLLM, which runs such heads, is not installed"
    try:
        results = run_benchmark(
            make_plan(_checked(config, method, examples, folder), ["none", method]),
            folder / CHECK,
            repeat=PASSES,
            limit=CHECKED,
            sequential=torch.cuda.is_available(),  # two engines would each take the whole of a GPU
            console=console,
        )
    except (ConfigError, ModelError) as error:  # what was learnt is there all the same
        return None, None, str(error)
    ratio = next((each for each in results.ratios if each.metric == SPEED), None)
    run = next((run for run in results.runs if run.name == method), None)
    why = "" if ratio else next((note for note in results.notes if "is not compared" in note), "")
    return ratio, run.acceptance_rate if run else None, why


def _checked(config: RunConfig, method: str, examples: ExampleSplit, folder: Path) -> RunConfig:
    """Return the config of a run over the held-out records with the draft."""
    assert config.input is not None
    held_out = write_held_out(config, examples, folder)
    raw = config.model_dump() | {
        "input": {"path": str(held_out), "format": "jsonl", "columns": config.input.columns.given},
        "speculation": {"method": method, "draft_model": str(folder / DRAFT)},
    }
    if method != DRAFT_MODEL and config.runner != "vllm":
        raw |= {"runner": "vllm", "runner_args": {}}
    return build_config(raw, "train-draft")
