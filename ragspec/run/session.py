"""A run's set-up, written once: the config's runner, prompts and index, found and judged before any weights load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ragspec import runners
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.prompts.builder import PromptBuilder
from ragspec.retrieval.search import Retriever
from ragspec.run.choice import Choice, choose
from ragspec.run.provenance import about
from ragspec.runners.base import Runner


@dataclass(frozen=True, slots=True)
class Session:
    """What a pass over an input needs; an executor (local.py) drives it. retriever: None: records bring contexts.

    config: with the runner that was chosen. choice: why that one, "" if it was named.
    """

    config: RunConfig
    choice: str
    runner: Runner
    prompts: PromptBuilder
    retriever: Retriever | None

    def identity(self) -> dict[str, Any]:
        """Return what an answer depends on; a resumed run must agree on it."""
        return self.config.identity() | ({"index": self.retriever.index.identity} if self.retriever else {})

    def notes(self) -> list[str]:
        """Return what the user should know so far, secrets hidden."""
        own = [self.choice] if self.choice else []
        return [*dict.fromkeys(map(self.config.veil(), [*own, *self.runner.notes])), *self.prompts.notes]

    def about(self) -> dict[str, Any]:
        """Return what identifies the run in its statistics."""
        return about(self.config, self.runner)


def prepare(config: RunConfig, choice: Choice | None = None) -> Session:
    """Return the session of a config; the model's weights are not loaded. choice: of its runner.

    Raises ConfigError.
    """
    choice = choice or choose(config, None)
    config = choice.config
    runner = check_runner(config)
    prompts = make_prompts(config, runner)
    retriever = Retriever(config.retrieval) if config.retrieval else None
    return Session(config, choice.why, runner, prompts, retriever)


def check_runner(config: RunConfig) -> Runner:
    """Return the config's runner, model and tokenizers found. Raises ConfigError."""
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
