"""Runners by name. The module name is the word in the YAML and in every message."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType

from ragspec.errors import ConfigError
from ragspec.suggest import did_you_mean


def names() -> list[str]:
    """Return the `runner:` words, one per module of this folder that holds a `Runner`."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base" and not m.ispkg)


def module(name: str) -> ModuleType:
    """Return the module of runner `name`. Raises ConfigError, with the known names, for any other."""
    if name not in names():
        raise ConfigError(f'runner: "{name}" is not known{did_you_mean(name, names())}')
    return import_module(f"{__name__}.{name}")


def check_method(runner: str, method: str) -> None:
    """Raise ConfigError unless `runner` has the speculation `method`."""
    known: tuple[str, ...] = module(runner).METHODS
    if method in known:
        return
    elsewhere = [name for name in names() if name != runner and method in module(name).METHODS]
    if elsewhere:
        raise ConfigError(
            f'speculation.method: runner "{runner}" has no "{method}" (runner {" and ".join(elsewhere)} has it); '
            f"it has {', '.join(known)}"
        )
    raise ConfigError(f'speculation.method: "{method}" is not known{did_you_mean(method, known)}')
