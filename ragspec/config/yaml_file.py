"""YAML with line numbers in its errors. A repeated key is an error, numbers keep all their digits, and 1e-4 is a
number, which PyYAML's YAML 1.1 reads as text."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from ragspec.errors import ConfigError, flat
from ragspec.json_text import number_of

DECIMAL = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


class RepeatedKey(ConfigError):
    """A key that appears twice in one mapping."""


class _Repeated(yaml.constructor.ConstructorError):
    pass


class _Loader(yaml.SafeLoader):
    last_counts = False  # whether a repeated key is allowed, the last value winning

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen and not self.last_counts:
                raise _Repeated(None, None, f'key "{key}" appears twice', key_node.start_mark)
            seen.add(key if isinstance(key, Hashable) else repr(key))
        return super().construct_mapping(node, deep)


def _decimal(loader: _Loader, node: yaml.ScalarNode) -> float:
    """Return a decimal with all its digits."""
    text = str(loader.construct_scalar(node)).replace("_", "")
    return number_of(text) if DECIMAL.fullmatch(text) else loader.construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:float", _decimal)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


class _LastCounts(_Loader):
    last_counts = True


def read_yaml(path: str, *, last_counts: bool = False) -> dict[str, Any]:
    """Return the mapping in file `path`. Raises ConfigError with file and line.

    last_counts: for a repeated key take the last value, as other YAML readers do, instead of raising RepeatedKey.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; --config takes the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    value = parse_yaml(text, path, last_counts=last_counts)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must contain keys and values, for instance `model: demo`; see sample_configs/")
    bad = next((key for key in value if not isinstance(key, str)), None)
    if bad is not None:
        raise ConfigError(f'{path}: key "{bad}" must be a word')
    return value


WORDS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float")}


def parse_scalar(text: str) -> Any:
    """Return a word's YAML value: null, a boolean, a number, a quoted text, else the text, in which # is literal."""
    word = text.strip()
    if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'":
        try:
            return parse_flow(word, "")
        except ConfigError:
            return text
    loader = _Loader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, word, (True, False))  # type: ignore[no-untyped-call]
        return loader.construct_object(yaml.ScalarNode(tag, word)) if tag in WORDS else text
    except ValueError:  # only looks like a number, such as 0b
        return text
    finally:
        loader.dispose()


def parse_flow(text: str, source: str) -> Any:
    """Return a bracketed list or object. Anything after it, even a comment, raises ConfigError."""
    _check_whole(text, source)
    return parse_yaml(text, source)


def parse_texts(text: str, source: str) -> Any:
    """Return a bracketed list with all items as texts (`[yes, 1]`). Raises ConfigError."""
    _check_whole(text, source)
    return yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 (constructs only texts, lists and mappings)


def _check_whole(text: str, source: str) -> None:
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or getattr(error, "context", None) or flat(error)
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(problem).split())}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    if node is None or text[node.end_mark.index :].strip():
        raise ConfigError(f"{source}: not valid YAML: there is more after {text[: node.end_mark.index if node else 0]}")


def parse_yaml(text: str, source: str, *, last_counts: bool = False) -> Any:
    """Return the value of YAML `text`. Raises ConfigError that begins with `source` and the line."""
    try:
        return yaml.load(text, Loader=_LastCounts if last_counts else _Loader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark and "\n" in text else ""
        problem = " ".join(str(error.problem or error.context).split())
        kind = RepeatedKey if isinstance(error, _Repeated) else ConfigError
        raise kind(f"{source}{line}: not valid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not valid YAML: {flat(error)}") from None
