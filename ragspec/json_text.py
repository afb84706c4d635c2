"""JSON of users, without rounding: `loads(b'{"n": 12345678901234567890123}')["n"] + 1`.

orjson reads an integer beyond 64 bits as the nearest double, and so it does a decimal with more digits than a double
has; what it reads like that, and what it cannot write, is read and written here digit by digit. Everything else is
orjson's own, and as fast. Limit: an integer has at most 4,300 digits (Python's own limit).
"""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any

import orjson

JSONDecodeError = orjson.JSONDecodeError
NO_NUMBER = re.compile(r"-?(?:NaN|Infinity)")
# where a number may need more than orjson has: 16 digits in a row, an exponent of three
SHAPES = (b"0" * 16, b"0e000", b"0e-000")
LOOK = bytes.maketrans(
    bytes(range(256)),
    bytes(
        ord("0") if c in b"0123456789." else ord("e") if c in b"eE" else ord("-") if c in b"+-" else 32
        for c in range(256)
    ),
)


class ExactFloat(float):
    """A decimal that no double equals. It counts as the nearest double; its text has all its digits."""

    text: str

    def __new__(cls, text: str) -> ExactFloat:
        self = super().__new__(cls, text)
        self.text = text
        return self

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else self.text

    def __reduce__(self) -> tuple[type[ExactFloat], tuple[str]]:
        return ExactFloat, (self.text,)


def number_of(text: str) -> float:
    """Return a decimal as a double if that has the same digits, else as an ExactFloat."""
    value = float(text)
    return value if value - value == 0 and _is_same(text, value) else ExactFloat(text)


def _is_same(text: str, value: float) -> bool:
    try:
        return Decimal(text) == Decimal(repr(value))
    except InvalidOperation:  # an exponent beyond what Decimal holds: 1e-99999999999999999999
        return False


def loads(data: bytes | str) -> Any:
    """Return the value of a JSON text. Raises JSONDecodeError, a ValueError."""
    shape = (data if isinstance(data, bytes) else data.encode(errors="surrogatepass")).translate(LOOK)
    if not any(each in shape for each in SHAPES):
        return _loads_by_orjson(data)
    text = ""
    try:
        text = data.decode() if isinstance(data, bytes) else data
        value = json.loads(text, parse_float=number_of, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode()  # no half characters, which orjson does not read either
    except json.JSONDecodeError as error:
        raise JSONDecodeError(error.msg, error.doc, error.pos) from None
    except (ValueError, RecursionError) as error:
        raise JSONDecodeError(str(error), text, 0) from None
    return value


def _loads_by_orjson(data: bytes | str) -> Any:
    try:
        return orjson.loads(data)
    except JSONDecodeError as error:
        at = error.pos - (error.doc[error.pos - 1 : error.pos] == "-")  # orjson takes the sign for a number's
        found = NO_NUMBER.match(error.doc, at)
        if found is None:
            raise
        raise JSONDecodeError(_no_json(found[0]), error.doc, at) from None


def dumps(value: Any, option: int = 0) -> bytes:
    """Return `value` as JSON text. option: orjson's. Raises TypeError for what JSON cannot hold."""
    try:
        return orjson.dumps(value, default=_as_it_is, option=option)
    except TypeError:
        return orjson.dumps(_with_long_integers(value), default=_as_it_is, option=option)


def _as_it_is(value: Any) -> orjson.Fragment:
    if isinstance(value, ExactFloat):
        return orjson.Fragment(value.text)
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def _with_long_integers(value: Any) -> Any:
    """Return a copy of nested `value` with integers that orjson refuses as text that it copies."""
    if isinstance(value, dict):
        return {key: _with_long_integers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_long_integers(inner) for inner in value]
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 64:
        return orjson.Fragment(str(value))
    return value


def _refuse(word: str) -> Any:
    raise ValueError(_no_json(word))


def _no_json(word: str) -> str:
    return f"{word}, which Python's json writes, is not JSON: write null"
