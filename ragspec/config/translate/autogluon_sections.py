"""The sections of an AutoGluon-RAG config, whatever its age, under the names of 0.1.

    >>> sections = gather({"retriever": {"top_k_embeddings": 20, "num_gpus": 0}}, Reading("c.yaml"))
    >>> sections["retriever"].take("retriever_top_k"), sections["retriever"].rest()
    (20, ['num_gpus'])

Limit: a key that AutoGluon-RAG has never had is an error, wherever it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ragspec.config.translate.autogluon_keys import FLAT, KEYS, NAMES, OLD_SECTIONS, PLATFORM_NAMES
from ragspec.errors import ConfigError, did_you_mean

PLATFORM_ARGS = "generator_model_platform_args"
KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
LONGEST = 60  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Reading:
    """A file that is being read, and what the command wants of it.

    given: our keys that come from elsewhere ("model", "retrieval.corpus"), so that theirs need not work.
    only_retrieval: whether the command builds or searches an index, and needs no generator.
    """

    source: str
    given: frozenset[str] = frozenset()
    only_retrieval: bool = False
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Tell the user what was not taken over as it is."""
        self.notes.append(f"{self.source}: {text}")

    def error(self, text: str) -> ConfigError:
        """Return an error that names the file."""
        return ConfigError(f"{self.source}: {text}")


class Setting(NamedTuple):
    """A key as the file has it. where: what comes before it, "retriever." for instance; key: its name in 0.1."""

    section: str
    where: str
    written: str
    key: str
    value: Any


class Section:
    """One section's settings. `take` hands one out; what nobody has taken is the rest, which is ignored."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._settings: dict[str, Setting] = {}

    def put(self, setting: Setting) -> Setting | None:
        """Keep a setting; return the one kept before it under this key, if its value is another."""
        kept = self._settings.setdefault(setting.key, setting)
        return None if kept.value == setting.value else kept

    def get(self, key: str) -> Any:
        """Return the value of `key` without taking it; None if it is not set."""
        return self._settings[key].value if key in self._settings else None

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, and `default` if it is not set, or null."""
        return self._settings.pop(key).value if key in self._settings else default

    def take_mapping(self, key: str) -> dict[str, Any]:
        """Return a copy of the mapping under `key` without its nulls, empty if there is none.

        Raises ConfigError for anything else.
        """
        written = self._settings[key].written if key in self._settings else key
        mapping = mapping_of(self.take(key), f"{self._source}: {written}")
        return {name: value for name, value in mapping.items() if value is not None}

    def drop(self, keys: Container[str]) -> list[str]:
        """Take those of `keys` that are set, and return their names as written."""
        return [self._settings.pop(key).written for key in list(self._settings) if key in keys]

    def rest(self) -> list[str]:
        """Return the names, as written, of the settings that nobody has taken."""
        return [setting.written for setting in self._settings.values()]


def gather(raw: Mapping[str, Any], reading: Reading) -> dict[str, Section]:
    """Return the settings of `raw` by section. Nulls, and keys of ragspec itself, are left out.

    AutoGluon-RAG reads sections only, so they come before the top level; today's names come before older ones. A note
    names what is set twice, with different values. Raises ConfigError for unknown keys.
    """
    sections = {name: Section(reading.source) for name in KEYS}
    for setting in _settings(raw, reading.source):
        if setting.value is None:
            continue
        if kept := sections[setting.section].put(setting):
            first = f"{kept.where}{kept.written}"
            reading.note(f"{setting.where}{setting.written}: ignored; {first} is set, and comes first")
    return sections


def _settings(raw: Mapping[str, Any], source: str) -> Iterator[Setting]:
    """Yield the settings of a file, those that come first before others."""
    for name in (*KEYS, *OLD_SECTIONS):
        inner = mapping_of(raw.get(name), f"{source}: {name}")
        if name == "generator":
            yield from _platform_args(inner.pop(PLATFORM_ARGS, None), source)
        yield from _named(inner, OLD_SECTIONS.get(name, name), f"{name}.", source)
    yield from _platform_args(raw.get(PLATFORM_ARGS), source)
    for section in KEYS:
        flat = {key: value for key, value in raw.items() if FLAT.get(key) == section and key != PLATFORM_ARGS}
        yield from _named(flat, section, "", source)


def _platform_args(value: Any, source: str) -> Iterator[Setting]:
    args = mapping_of(value, f"{source}: {PLATFORM_ARGS}")
    return _named(args, "generator", f"{PLATFORM_ARGS}.", source, PLATFORM_NAMES)


def _named(
    inner: dict[str, Any], section: str, where: str, source: str, names: dict[str, str] | None = None
) -> Iterator[Setting]:
    names = names or NAMES[section]
    for written in inner:
        if written not in names:
            lower = [name for name in names if name.islower()]
            hint = did_you_mean(str(written), lower, sorted(set(names.values())))
            raise ConfigError(f"{source}: {where}{written} is not a known key{hint}")
    for written in sorted(inner, key=lambda name: names[name] != name):  # today's names before older ones
        yield Setting(section, where, written, names[written], inner[written])


def mapping_of(value: Any, where: str) -> dict[str, Any]:
    """Return a copy of a mapping, empty for null. Raises ConfigError, which does not show the value."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        kind = KINDS.get(type(value), type(value).__name__)
        raise ConfigError(f"{where}: must contain keys and values, got {kind}")
    return dict(value)


def quoted(value: Any) -> str:
    """Return a value as messages show it: on one line, and not longer than that."""
    return f'"{" ".join(str(value).split())[:LONGEST]}"'
