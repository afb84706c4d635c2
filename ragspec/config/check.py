"""A pydantic model's complaint as one line: file, key, value, what is allowed."""

from __future__ import annotations

import json
from types import NoneType
from typing import Annotated, Any, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ragspec.config.secret import concealed
from ragspec.errors import ConfigError, did_you_mean


def validate(model: type[BaseModel], raw: Any, source: str, prefix: str = "") -> BaseModel:
    """Return `raw` as a `model`. source, prefix: file and key that a message begins with. Raises ConfigError."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{source}: {_explain(model, cast(dict[str, Any], first), prefix)}") from None


def _explain(model: type[BaseModel], error: dict[str, Any], prefix: str) -> str:
    """Return one line for pydantic's first complaint: key, value, what is allowed."""
    path = [str(part) for part in error["loc"] if not (isinstance(part, str) and part in _UNION_TAGS)]
    key = ".".join(([prefix] if prefix else []) + path)
    if error["type"] == "extra_forbidden":
        return f'"{key}" is not a known key{did_you_mean(path[-1], _fields(model, path[:-1]))}'
    if error["type"] == "missing":
        return f"{key}: missing"
    allowed = error["msg"].replace("Input should be ", "must be ").replace("String should", "must")
    if error["type"] == "value_error":
        return f"{key}.{allowed.removeprefix('Value error, ')}"
    if error["type"] == "model_type":
        allowed = "must contain keys and values"
    alternatives = _alternatives(model, path)
    value = concealed({path[-1] if path else "": error["input"]})
    return f"{key}: {_short(*value.values())} is not allowed: {alternatives or allowed}"


# pydantic adds the tried branch of a union to the location
_UNION_TAGS = {"int", "bool", "str", "float", "literal['auto']", "constrained-int"}


def _alternatives(model: type[BaseModel], path: list[str]) -> str:
    """Return what a union of a type and "auto" takes; pydantic would complain about only one branch."""
    if path[-1:] in (["num_tokens"], ["batch_size"]):
        return 'must be a whole number from 1, or "auto"'
    return 'must be true, false or "auto"' if path[-1:] == ["chat"] else ""


def _fields(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        inner: Any = model.model_fields[part].annotation if part in model.model_fields else None
        inner = next((choice for choice in get_args(inner) if choice is not NoneType), inner)  # left out: None
        inner = get_args(inner)[0] if get_origin(inner) is Annotated else inner
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
