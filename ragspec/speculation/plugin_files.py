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
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError, flat

VARIABLE = "RAGSPEC_PLUGINS"
PREFIX = "ragspec_plugin_"  # of the modules' names
BETWEEN = "\n"  # the paths in the variable; a path may hold any other separator
_brought: dict[str, Any] = {}  # what files have registered in this process, by name


def add_plugins(paths: Sequence[str]) -> None:
    """Use the drafters in these files from now on. Raises ConfigError if one is no Python file."""
    named = [Path(path).expanduser().absolute() for path in paths]
    for path in named:
        _check(path)
    os.environ[VARIABLE] = BETWEEN.join(dict.fromkeys([*_paths(), *map(str, named)]))


def use_plugins(paths: Sequence[str], load: Callable[[], Any]) -> None:
    """Use the drafters in these files from now on, unless `load`, which runs them, raises. Raises ConfigError."""
    before = os.environ.get(VARIABLE, "")
    add_plugins(paths)
    try:
        load()
    except BaseException:
        os.environ[VARIABLE] = before
        raise


def load_plugins(register: Callable[[str, Any], None], registered: MutableMapping[str, Any]) -> None:
    """Run the files that have not run in this process. register: takes a drafter. registered: those that it took.

    Raises ConfigError if a file does not load, has no drafter, or has one of a name that is taken.
    """
    for path in _paths():
        name = module_name(path)
        if name not in sys.modules:
            before = dict(registered)
            try:
                _load(Path(path), name, register, registered)
            except BaseException:
                sys.modules.pop(name, None)
                registered.clear()
                registered.update(before)
                raise


def module_name(path: str) -> str:
    """Return the name under which a file is imported, another for each path."""
    return f"{PREFIX}{Path(path).stem}_{blake2b(path.encode(errors='surrogateescape'), digest_size=4).hexdigest()}"


def is_from_file(make: Any) -> bool:
    """Return whether a drafter is defined in a file of `--plugin`."""
    return str(getattr(make, "__module__", "")).startswith(PREFIX)


def is_brought(name: str, make: Any) -> bool:
    """Return whether a file has registered this drafter, so that other processes know it."""
    return name in _brought and _brought[name] is make


def _paths() -> list[str]:
    return [path for path in os.environ.get(VARIABLE, "").split(BETWEEN) if path]


def _check(path: Path) -> None:
    """Raise ConfigError if a path is no Python file."""
    if path.is_file() and path.suffix == ".py":
        return
    why = "is a folder" if path.is_dir() else "is not a Python file" if path.is_file() else "no such file"
    beside = path.with_name(f"{path.name}.py")
    near = f"; did you mean {beside.name}?" if beside.is_file() else "; give a Python file (.py) with a drafter"
    raise ConfigError(f"--plugin: {path}: {why}{near}")


def _load(path: Path, name: str, register: Callable[[str, Any], None], registered: MutableMapping[str, Any]) -> None:
    before = dict(registered)
    _check(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"--plugin: {path}: {type(error).__name__}: {flat(error, 200)}") from error
    if registered == before:
        register(path.stem, _drafter_in(path, vars(module), name))
    for taken in before:
        if registered[taken] is not before[taken]:
            raise ConfigError(f'--plugin: {path}: another drafter is already named "{taken}"; rename one of them')
    _brought.update({made: registered[made] for made in registered.keys() - before.keys()})


def _drafter_in(path: Path, names: Mapping[str, Any], module: str) -> Any:
    """Return the only drafter class of a file that registers none. Raises ConfigError."""
    found = [each for each in names.values() if inspect.isclass(each) and each.__module__ == module]
    drafters = [each for each in found if callable(getattr(each, "open", None))]
    if len(drafters) != 1:
        raise ConfigError(
            f"--plugin: {path}: has {len(drafters)} classes with a method `open`; call ragspec.register_drafter in it"
        )
    return drafters[0]
