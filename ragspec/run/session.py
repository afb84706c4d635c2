"""A run's set-up: choose and check the runner, build prompts and open the index before any weights load.

Also holds what a stats file records about a run: config, runner, versions, hashes, seed and peak memory.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragspec import __version__, runners
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.host.collection import collection_paused
from ragspec.host.machine import peak_memory
from ragspec.inputs.sources import digest
from ragspec.prompts.builder import PromptBuilder
from ragspec.retrieval.search import Retriever
from ragspec.run.runner_choice import RunnerChoice, check_model, choose_runner
from ragspec.runners.base import Runner

LIBRARIES = ("torch", "transformers", "vllm")


def about(config: RunConfig, runner: Runner) -> dict[str, Any]:
    """Return what identifies a run in its stats file."""
    versions = {name: sys.modules[name].__version__ for name in LIBRARIES if name in sys.modules}
    return {
        "config": config.model_dump(mode="json"),
        "runner": runner.about(),
        "versions": {"ragspec": __version__, "python": sys.version.split()[0], **versions},
        "input_sha256": digest(config.input),
        "template_sha256": hashlib.sha256((config.prompt.template or "").encode()).hexdigest(),
        "seed": config.sampling.seed,
    }


def peak_memory_gib(runner: Runner) -> float:
    """Return the peak resident size of this process and its engine's in GiB, or that on GPUs if it is larger."""
    both = zip(peak_memory(), runner.peak_elsewhere, strict=True)
    return max(here + elsewhere for here, elsewhere in both) / (1 << 30)


# -- session ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Session:
    """What a pass over an input needs; an executor (local.py, ray/driver.py) drives it.

    config: with the runner resolved. choice: why that runner was chosen. retriever: None if
    records bring their own contexts.
    """

    config: RunConfig
    choice: RunnerChoice
    runner: Runner
    prompts: PromptBuilder
    retriever: Retriever | None

    def identity(self) -> dict[str, Any]:
        """Return what answers depend on; a resumed run must match it."""
        return self.config.identity() | ({"index": self.retriever.index.identity} if self.retriever else {})

    def notes(self) -> list[str]:
        """Return the notes for the user so far, with secrets hidden."""
        own = [self.choice.why] if self.choice.why else []
        own += _unescaped(self.config.sampling.stop)
        own += self.retriever.notes() if self.retriever else []
        return [*dict.fromkeys(map(self.config.redactor(), [*own, *self.runner.notes])), *self.prompts.notes]

    def about(self) -> dict[str, Any]:
        """Return what identifies the run in its statistics."""
        return about(self.config, self.runner) | self.choice.about()


def _unescaped(stop: Sequence[str]) -> list[str]:
    """Return notes on stop strings that were meant to contain a control character."""
    meant = [text for text in stop if any(escape in text for escape in (r"\n", r"\r", r"\t"))]
    return [
        f"sampling.stop: '{text}' has a backslash and a letter, not a line break or tab: write $'{text}' in a shell, "
        f'and "{text}" in double quotes in YAML'
        for text in meant
    ]


def prepare(config: RunConfig, choice: RunnerChoice | None = None) -> Session:
    """Return the session of a config, without loading the model's weights.

    choice: the runner, if it has been chosen already. Raises ConfigError.
    """
    if choice is None:
        check_model(config)
        choice = choose_runner(config, None)
    config = choice.config
    runner = check_runner(config)
    prompts = make_prompts(config, runner)
    retriever = Retriever(config.retrieval) if config.retrieval else None
    return Session(config, choice, runner, prompts, retriever)


@collection_paused()
def check_runner(config: RunConfig) -> Runner:
    """Return the config's runner after its check(). Raises ConfigError."""
    runner = runners.module(config.runner).Runner(config)
    runner.check()
    return runner


def make_prompts(config: RunConfig, runner: Runner) -> PromptBuilder:
    """Return the run's prompt builder. Raises ConfigError if no prompt could ever be built."""
    new, length = config.sampling.max_new_tokens, runner.context_length
    if length is not None and new is not None and new >= length:
        raise ConfigError(
            f"sampling.max_new_tokens: {new} leaves no room for a prompt; the model takes {length} tokens in all"
        )
    return PromptBuilder(config.prompt, runner.tokenizer, length)
