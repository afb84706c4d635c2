"""`ragspec train-draft`: train a draft model or head on the target's answers, and measure whether it pays here.

DIR/answers.jsonl   the target's answers, resumed as any run
DIR/state.pt        the training state
DIR/draft           the draft: `speculation: {method: draft_model, draft_model: DIR/draft}`
DIR/check           a benchmark on the held-out records
DIR/draft.json      the result
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
LAYERS = 2  # of a draft model, by default
DRAFT, RESULT, CHECK = "draft", "draft.json", "check"
LOAD_ARGS = ("device", "num_gpus", "revision", "trust_remote_code", "model_args", "tokenizer_args")
PASSES = 3
CHECK_RECORDS = 32  # most records of the check


def ignore_progress(done: int, steps: int, loss: float) -> None:
    """Ignore progress: the default."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The result. method: that runs the draft. before, after: share of held-out tokens that the draft guesses.

    acceptance: acceptance rate on held-out records. ratio: speed of that run to one without drafts; low, high: its
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
        """Whether runs with the draft are faster here; None if the runs leave it open."""
        if self.low is None or self.high is None or self.low <= 1 <= self.high:
            return None
        return self.low > 1

    def verdict(self) -> str:
        """Return the conclusion in a sentence."""
        if self.ratio is None:
            return f"not timed: {self.untimed or 'no run finished'}"
        span = "one pass" if self.low is None else f"{self.low:.2f} to {self.high:.2f}"
        speed = f"{self.ratio:.2f}x ({span}) the speed without drafts"
        if self.pays is None:
            return (
                f"inconclusive: {speed}, which may be chance; compare on more records: ragspec "
                f"benchmark --method none --method {self.method} --repeat 9"
            )
        if self.pays:
            return f"it pays off on this machine: {speed}, end to end"
        return f"it does not pay off on this machine: {speed}; keep the previous method"


def train_draft(
    config: RunConfig,
    folder: Path,
    *,
    method: str = DRAFT_MODEL,
    layers: int | None = None,
    epochs: int,
    limit: int | None,
    console: Console,
    progress: Progress = ignore_progress,
) -> Trained:
    """Train a draft and measure it.

    Args:
        config: The run to speed up.
        folder: For answers, state, draft and result.
        method: One of METHODS.
        layers: Of the draft; None: the default of its method.
        epochs: Passes over the examples.
        limit: Records to answer, None for all.
        console: For progress.
        progress: Called after every training step with steps done, total steps, and loss.

    Raises:
        ConfigError: If the target or input does not allow it.
        ModelError: If the target fails.
    """
    plain = without_draft(config)
    target = _target(plain, method, layers)
    check_records(plain)
    console.print("the target answers the records ...")
    examples = answer(plain, folder, limit)
    started = time.monotonic()
    before, after = _teach(_make_learner(target, method, layers, examples), examples, folder, epochs, progress)
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
    write_json(folder / RESULT, asdict(trained) | {"pays": trained.pays, "verdict": trained.verdict()})
    return trained


def _target(config: RunConfig, method: str, layers: int | None) -> Checkpoint:
    """Return the target's checkpoint in float32, in which drafts are trained.

    Raises ConfigError if it cannot be loaded so, or cannot have such a draft.
    """
    if method not in METHODS:
        raise ConfigError(f'--method: "{method}" cannot be trained; choose one of {", ".join(METHODS)}')
    if config.model is None or config.runner == "fake":
        raise ConfigError("model: train-draft needs a model that transformers loads")
    given = {key: value for key, value in config.runner_args.items() if key in LOAD_ARGS}
    target = Checkpoint(config.model, Args.model_validate(given | {"dtype": "float32"}))
    if method == DRAFT_MODEL:
        check_layers(layers or LAYERS, target.config.get_text_config().num_hidden_layers)
    else:
        check_head(method, target)
    return target


def _make_learner(target: Checkpoint, method: str, layers: int | None, examples: ExampleSplit) -> Trainable:
    """Load the target, and return the untrained draft."""
    if method != DRAFT_MODEL:
        return Head(method, target, target.load(), layers, examples.taught)
    dtype = getattr(target.config, "dtype", None) or torch.float32
    return Student(cut_student(target.load(), layers or LAYERS), target.tokenizer.inner, dtype)


def _teach(
    learner: Trainable, examples: ExampleSplit, folder: Path, epochs: int, progress: Progress
) -> tuple[float, float]:
    """Train and save a draft; return its agreement with the target before and after."""
    before = learner.agreement(examples.held_out)
    distill(learner, examples.taught, epochs, folder, progress)
    learner.save(folder / DRAFT)
    return before, learner.agreement(examples.held_out)


def _check(
    config: RunConfig, method: str, examples: ExampleSplit, folder: Path, console: Console
) -> tuple[Ratio | None, float | None, str]:
    """Time runs over the held-out records with and without the draft, alternating; or say why that failed."""
    if method != DRAFT_MODEL and find_spec("vllm") is None:
        return None, None, "vLLM, which runs such heads, is not installed"
    try:
        results = run_benchmark(
            make_plan(_check_config(config, method, examples, folder), ["none", method]),
            folder / CHECK,
            repeat=PASSES,
            limit=CHECK_RECORDS,
            sequential=torch.cuda.is_available(),  # two engines would each take the whole of a GPU
            console=console,
        )
    except (ConfigError, ModelError) as error:  # the trained draft is kept all the same
        return None, None, str(error)
    ratio = next((each for each in results.ratios if each.metric == SPEED), None)
    run = next((run for run in results.runs if run.name == method), None)
    why = "" if ratio else next((note for note in results.notes if "is not compared" in note), "")
    return ratio, run.acceptance_rate if run else None, why


def _check_config(config: RunConfig, method: str, examples: ExampleSplit, folder: Path) -> RunConfig:
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
