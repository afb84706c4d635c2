"""Runners by name: the name of a module or folder in this package is the `runner:` word of configs and messages."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from ragspec.errors import ConfigError, did_you_mean
from ragspec.runners.base import Runner, RunnerArgs

if TYPE_CHECKING:
    from ragspec.config.run import RunConfig
    from ragspec.runners import fake
    from ragspec.runners.huggingface import runner as huggingface
    from ragspec.runners.vllm import runner as vllm


class RunnerModule(Protocol):
    """What a runner's module provides."""

    @property
    def Args(self) -> type[RunnerArgs]:
        """Return the pydantic model of the runner's `runner_args`."""

    def Runner(self, config: RunConfig, /) -> Runner:
        """Return the runner of a config, with nothing loaded."""


def names() -> list[str]:
    """Return the known `runner:` words."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name != "base")


def module(name: str) -> RunnerModule:
    """Return the module of runner `name`. Raises ConfigError, listing the known names, for any other."""
    for found in pkgutil.iter_modules(__path__):
        if found.name == name and name != "base":
            path = f"{__name__}.{name}.runner" if found.ispkg else f"{__name__}.{name}"
            return cast(RunnerModule, import_module(path))
    raise ConfigError(f'runner: "{name}" is not known{did_you_mean(name, names())}')


if TYPE_CHECKING:  # each runner module has to match the protocol
    _fake: RunnerModule = fake
    _huggingface: RunnerModule = huggingface
    _vllm: RunnerModule = vllm
