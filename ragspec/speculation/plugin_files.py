"""Drafters in files of the user's: `--plugin my_drafter.py`, then `--method my_drafter`.

The files' paths are in an environment variable, so that processes which this one starts know them too. A file registers
its drafters with `ragspec.register_drafter`; one that registers none and has a single class with a method `open` is a
drafter under the file's name. Limit: workers on other machines do not have the files.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError, flat

VARIABLE = "RAGSPEC_PLUGINS"
PREFIX = "ragspec_plugin_"  # of the modules' names


def add_plugins(paths: Sequence[str]) -> None:
    """Use the drafters in these files from now on. Raises ConfigError if a file does not load."""
    named = [str(Path(path).expanduser().absolute()) for path in paths]
    before = [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*before, *named]))


def load_plugins(register: Callable[[str, Any], None], known: Callable[[], int]) -> None:
    """Run the files that have not run in this process. register: takes a drafter. known: how many are registered."""
    for path in os.environ.get(VARIABLE, "").split(os.pathsep):
        name = PREFIX + Path(path).stem
        if path and getattr(sys.modules.get(name), "__file__", None) != path:
            _load(Path(path), name, register, known)


def _load(path: Path, name: str, register: Callable[[str, Any], None], known: Callable[[], int]) -> None:
    before = known()
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--plugin: {path}: no such file; give a Python file (.py) with a drafter")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        del sys.modules[name]
        raise ConfigError(f"--plugin: {path}: {type(error).__name__}: {flat(error, 200)}") from error
    if known() > before:
        return
    found = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == name]
    drafters = [each for each in found if callable(getattr(each, "open", None))]
    if len(drafters) != 1:
        raise ConfigError(
            f"--plugin: {path}: has {len(drafters)} classes with a method `open`; call ragspec.register_drafter in it"
        )
    register(path.stem, drafters[0])
