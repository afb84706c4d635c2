"""The files beside an output: `answers.run.json`, which says which config started it, and the names of the others.

>>> sibling("out/answers.jsonl", ".stats.json")
PosixPath('out/answers.stats.json')
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson

from ragspec.errors import ConfigError
from ragspec.outputs.base import Document
from ragspec.outputs.documents import LocalDocument

STATE, STATISTICS, PENDING = ".run.json", ".stats.json", ".pending.jsonl"
WAY_OUT = "; use the config it was started with, choose another --output, or use --no-resume (which keeps it as a copy)"


def sibling(output: str, suffix: str) -> Path:
    """Return the path beside `output` with another ending: out/answers.jsonl -> out/answers.stats.json."""
    path = Path(output)
    return path.with_name(path.name.removesuffix(".jsonl") + suffix)


def check_writable(path: Path, key: str) -> None:
    """Raise ConfigError, beginning with `key`, if no file can be written at `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError
    except OSError:
        raise ConfigError(f"{key}: {path} cannot be written; choose another file") from None


class RunState:
    """What `run.json` says: the config that started the output `output`."""

    def __init__(self, output: str, document: Document) -> None:
        self._name = output
        self._document = document

    def check_names(self) -> None:
        """Raise ConfigError if what belongs to the output belongs to another one too."""

    def is_ours(self) -> bool:
        """Return whether it says what a run of ragspec's writes there."""
        return isinstance(self.read().get("config"), dict)

    def began_by(self) -> str | None:
        """Return the runner that began the output; None if that is not known."""
        config = self.read().get("config")
        runner = config.get("runner") if isinstance(config, dict) else None
        return runner if isinstance(runner, str) else None

    def check_config(self, identity: dict[str, Any]) -> None:
        """Raise ConfigError, naming the key, if another config started the output."""
        began = self.read().get("config")
        if not isinstance(began, dict):
            name = self._document.name.rpartition("/")[2]
            raise ConfigError(f"{self._name}: contains lines, but {name} does not say which config wrote them{WAY_OUT}")
        changed = _difference(began, orjson.loads(orjson.dumps(identity)))
        if changed:
            raise ConfigError(f"{self._name}: was started with a different config: {changed}{WAY_OUT}")

    def write(self, identity: dict[str, Any]) -> None:
        """Record which config starts the output. Raises ConfigError."""
        try:
            self._document.write({"config": identity, "output": self._name.rstrip("/").rpartition("/")[2]})
        except OSError as error:
            where = error.filename or self._document.name
            raise ConfigError(f"{where}: cannot be written ({error.strerror}); choose another --output") from None

    def read(self) -> dict[str, Any]:
        """Return what the file says; nothing where there is none. Raises ConfigError where nobody can tell."""
        try:
            return self._document.read()
        except OSError as error:
            where = error.filename or self._document.name
            raise ConfigError(f"{where}: cannot be read ({error.strerror}); choose another --output") from None


class FileState(RunState):
    """The same for an output that is one file, from `answers.run.json` beside it."""

    def __init__(self, output: str) -> None:
        self.path = sibling(output, STATE)
        super().__init__(output, LocalDocument(self.path))
        self._output = Path(output)

    def check_names(self) -> None:
        """Raise ConfigError if a file beside the output is another output's."""
        twin = self._twin()
        if twin is not None and self._is_state_of(twin):
            raise ConfigError(
                f"{self._output}: its state file would be {self.path.name}, which belongs to {twin.name}; "
                "choose another --output"
            )
        pending = sibling(str(self._output), PENDING)
        if sibling(str(pending), STATE).exists():
            raise ConfigError(
                f"{self._output}: answers waiting for earlier ones would go to {pending.name}, which is another run's "
                "output; choose another --output"
            )

    def _twin(self) -> Path | None:
        """Return the other output that has the same files beside it: `a` and `a.jsonl` do."""
        name = self._output.name
        other = name.removesuffix(".jsonl") if name.endswith(".jsonl") else f"{name}.jsonl"
        if not other or sibling(other, STATE) != sibling(name, STATE):
            return None
        return self._output.with_name(other)

    def _is_state_of(self, twin: Path) -> bool:
        owner = self.read().get("output")
        if owner is not None:
            return bool(owner == twin.name) and twin.is_file()
        # a file from before owners were named belongs to the output that has lines
        return self.path.exists() and _has_lines(twin) and not _has_lines(self._output)


def _has_lines(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _difference(old: Any, new: Any, path: str = "") -> str:
    """Return "key: was A, is now B" for the first difference, or "" if there is none."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            inner = _difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            if inner:
                return inner
        return ""
    return "" if old == new else f"{path}: was {_shown(old)}, is now {_shown(new)}"


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."
