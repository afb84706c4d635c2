"""A config as a YAML file with comments, for `--save-config` and `ragspec init`.

>>> print(commented(config, {"model": "demo"}, ["Written by hand."]))

Only keys that were given are written, each under the description that the reference has for it. Secrets are written as
names of environment variables.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from ragspec import runners
from ragspec.config.redaction import by_name
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.host.files import write_whole

WIDTH = 100  # columns of a comment
NAMES_FILES = (("prompt", "template"), ("structured", "json_schema"), ("structured", "grammar"))


def save_config(config: RunConfig, given: Mapping[str, Any], path: Path, why: Sequence[str], *, force: bool) -> None:
    """Write a config with comments, to stdout for -. force: replace an existing file. Raises ConfigError."""
    text = commented(config, given, why)
    if str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        if path.exists() and not force and path.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{path}: already exists with other content; choose another name, or delete it")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def commented(config: RunConfig, given: Mapping[str, Any], why: Sequence[str]) -> str:
    """Return the YAML of a checked config.

    Args:
        config: The config.
        given: The values that it was checked from, which name files where the config has their texts.
        why: Lines to begin with.
    """
    named: dict[str, str] = {}
    values: dict[str, Any] = by_name(config.model_dump(exclude_unset=True), "", named)
    for section, key in NAMES_FILES:
        before = given.get(section)
        if isinstance(before, Mapping) and isinstance(before.get(key), str):
            values[section][key] = before[key]
    head = list(why)
    if named:
        head.append("Secrets are not written here. Before running this config, set in the environment:")
        head += [f"  {name}: the value of {key}" for name, key in named.items()]
    lines = [f"# {line}" for line in head]
    for key in RunConfig.model_fields:
        if key in values and values[key] not in (None, {}):
            lines += ["", *_entry(RunConfig, key, _short(key, values[key]), config)]
    return "\n".join([*lines, "", "# Every other key: docs/reference/config.md", ""])


def _short(key: str, value: Any) -> Any:
    """Return an input or output that is nothing but a path as that path."""
    if key == "input" and isinstance(value, dict) and len(value["path"]) == 1:
        value = {**value, "path": value["path"][0]}
    return (
        value["path"] if key in ("input", "output") and isinstance(value, dict) and list(value) == ["path"] else value
    )


def _entry(model: type[BaseModel] | None, key: str, value: Any, config: RunConfig) -> Iterator[str]:
    """Yield the lines of a key: what it means, and its value."""
    section = _section(model, key)
    if key == "runner_args" and section is None:
        section = runners.module(config.runners()[0]).Args
    yield from _comment(model, key, section)
    if section is None or not isinstance(value, dict):
        yield from yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=WIDTH).splitlines()
        return
    yield f"{key}:"
    for inner, each in value.items():
        yield from (f"  {line}" for line in _entry(section, inner, each, config))


def _comment(model: type[BaseModel] | None, key: str, section: type[BaseModel] | None) -> list[str]:
    """Return the first sentence of what a key means as comment lines."""
    field = model.model_fields.get(key) if model is not None else None
    text = (field.description if field is not None else "") or (section.__doc__ if section is not None else "") or ""
    sentence = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(text.split())).replace("`", "")
    end = sentence.find(". ")
    sentence = sentence if end < 0 else sentence[: end + 1]
    return textwrap.wrap(sentence, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _section(model: type[BaseModel] | None, key: str) -> type[BaseModel] | None:
    """Return the model of a key that is a section, else None."""
    field = model.model_fields.get(key) if model is not None else None
    kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
