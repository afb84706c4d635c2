"""`--set KEY.PATH=VALUE`: the type of the key decides how the value is read.

>>> raw = {}; override(raw, "output=OUT #1.jsonl", {}); override(raw, "sampling.seed=1", {}); raw
{'output': 'OUT #1.jsonl', 'sampling': {'seed': 1}}

A text key takes the value literally: no comments, quotes, numbers or nulls. Other keys take YAML. Keys that take both
read `[...]` and `{...}` as YAML and anything else literally. Keys of free dictionaries (`runner_args.*` of vllm,
`model_args`) take YAML scalars, in which `#` begins no comment.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ragspec import runners
from ragspec.config.run import CHOICES, RunConfig
from ragspec.config.yaml_file import parse_flow, parse_scalar, parse_texts, parse_yaml
from ragspec.errors import ConfigError
from ragspec.speculation.methods import AUTO

SECTIONS = ("input", "output", "contexts")  # a path alone may replace these


def override(raw: dict[str, Any], given: str, later: Mapping[str, Any]) -> None:
    """Set a key in a config's raw values. later: all overrides, for `runner`. Raises ConfigError."""
    key, equals, value = given.partition("=")
    if not equals or not key:
        raise ConfigError(f'--set: "{given}" is not KEY.PATH=VALUE, for instance sampling.temperature=0.7')
    *parents, last = key.split(".")
    place = raw
    for parent in parents:
        if place.get(parent) is None:
            place[parent] = {}
        elif parent in SECTIONS and isinstance(place[parent], str | list):
            place[parent] = {"path": place[parent]}
        place = place[parent]
        if not isinstance(place, dict):
            raise ConfigError(f'--set: "{key}": "{parent}" is a value and has no keys')
    runner = later.get("runner", raw.get("runner"))
    place[last] = value_of(value, _type_of([*parents, last], runner), f"--set {key}")


def value_of(text: str, kind: Any, where: str) -> Any:
    """Return the value of `text` for a key of type `kind`. where: begins messages. Raises ConfigError."""
    forms = list(_forms(kind))
    if Any in forms:
        return parse_flow(text, where) if _is_flow(text) else parse_scalar(text)
    if all(form in (str, type(None)) or _is_word(form) for form in forms):
        return text
    lists = next((form for form in forms if form is list or get_origin(form) is list), None)
    mapping = any(form is dict or get_origin(form) is dict or _is_section(form) for form in forms)
    if lists is not None and text.strip()[:1] == "[" and _holds_texts(lists):
        return _or_text(parse_texts, text, where, forms)
    if str not in forms:
        return parse_yaml(text, where) if mapping or lists is not None else parse_scalar(text)
    if (lists is not None and text.strip()[:1] == "[") or (mapping and text.strip()[:1] == "{"):
        return _or_text(parse_flow, text, where, forms)
    scalar = parse_scalar(text)
    return scalar if type(scalar) in (bool, int, float) and type(scalar) in forms else text


def _or_text(parse: Any, text: str, where: str, forms: list[Any]) -> Any:
    """Return the YAML value of a text; the text itself if it is invalid YAML and the key takes text ("[a]b.jsonl")."""
    try:
        return parse(text, where)
    except ConfigError:
        if str in forms:
            return text
        raise


def _is_flow(text: str) -> bool:
    return text.strip()[:1] in ("[", "{")


def _type_of(keys: list[str], runner: Any) -> Any:
    """Return the type of a key, Any if the config's models do not define it."""
    if keys[0] == "runner_args" and len(keys) > 1:
        names = CHOICES if runner in (None, AUTO) else (runner,)
        found = (_inside(runners.module(name).Args, keys[1:]) for name in names if name in runners.names())
        return next((kind for kind in found if kind is not Any), Any)
    return _inside(RunConfig, keys)


def _inside(kind: Any, keys: list[str]) -> Any:
    for key in keys:
        forms = list(_forms(kind))
        section = next((form for form in forms if _is_section(form)), None)
        free = next((form for form in forms if get_origin(form) is dict), None)
        if section is not None and key in section.model_fields:
            field = section.model_fields[key]
            kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        elif section is None and free is not None:
            kind = get_args(free)[1]
        else:
            return Any
    return kind


def _forms(kind: Any) -> Iterator[Any]:
    """Yield the members of a union type; for a Literal, one `Literal[word]` per word."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *about = get_args(kind)
        written = [getattr(each, "json_schema_input_type", PydanticUndefined) for each in about]
        yield from _forms(next((each for each in reversed(written) if each is not PydanticUndefined), inner))
    elif origin in (Union, types.UnionType):
        for each in get_args(kind):
            yield from _forms(each)
    elif origin is Literal:
        yield from (Literal[value] if isinstance(value, str) else type(value) for value in get_args(kind))
    else:
        yield kind


def _is_word(form: Any) -> bool:
    return get_origin(form) is Literal


def _is_section(form: Any) -> bool:
    return isinstance(form, type) and issubclass(form, BaseModel)


def _holds_texts(kind: Any) -> bool:
    """Return whether the items of a list are texts."""
    return all(form is str or _is_word(form) for item in get_args(kind) for form in _forms(item))
