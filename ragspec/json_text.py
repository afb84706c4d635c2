"""JSON without rounding: `loads(b'{"n": 12345678901234567890123}')["n"] + 1`.

orjson rounds integers beyond 64 bits and decimals with more digits than a double holds. `loads` and `dumps` keep the
digits of such numbers and leave everything else to orjson, at its speed. Limit: an integer has at most 4,300 digits
(Python's own limit).
"""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any

import orjson

JSONDecodeError = orjson.JSONDecodeError
NOT_A_NUMBER = re.compile(r"-?(?:NaN|Infinity)")
# number shapes that may exceed a double, in the alphabet of TO_SHAPE: 16 digits in a row, a three-digit exponent
LONG_SHAPES = (b"0" * 16, b"0e000", b"0e-000")
TO_SHAPE = bytes.maketrans(
    bytes(range(256)),
    bytes(
        ord("0") if c in b"0123456789." else ord("e") if c in b"eE" else ord("-") if c in b"+-" else 32
        for c in range(256)
    ),
)


class ExactFloat(float):
    """A decimal that no double equals: computes as the nearest double, prints with all its digits."""

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
    """Return a decimal as a float if that has the same digits, else as an ExactFloat."""
    value = float(text)
    return value if value - value == 0 and _is_same(text, value) else ExactFloat(text)


def _is_same(text: str, value: float) -> bool:
    try:
        return Decimal(text) == Decimal(repr(value))
    except InvalidOperation:  # an exponent beyond what Decimal holds: 1e-99999999999999999999
        return False


def loads(data: bytes | str) -> Any:
    """Return the value of a JSON text. Raises JSONDecodeError, a ValueError."""
    shape = (data if isinstance(data, bytes) else data.encode(errors="surrogatepass")).translate(TO_SHAPE)
    if not any(each in shape for each in LONG_SHAPES):
        return _loads_by_orjson(data)
    text = ""
    try:
        text = data.decode() if isinstance(data, bytes) else data
        value = json.loads(text, parse_float=number_of, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode()  # refuses lone surrogates, as orjson does
    except json.JSONDecodeError as error:
        raise JSONDecodeError(error.msg, error.doc, error.pos) from None
    except (ValueError, RecursionError) as error:
        raise JSONDecodeError(str(error), text, 0) from None
    return value


def _loads_by_orjson(data: bytes | str) -> Any:
    try:
        return orjson.loads(data)
    except JSONDecodeError as error:
        at = error.pos - (error.doc[error.pos - 1 : error.pos] == "-")  # orjson reports the position behind the sign
        found = NOT_A_NUMBER.match(error.doc, at)
        if found is None:
            raise
        raise JSONDecodeError(_not_json(found[0]), error.doc, at) from None


def dumps(value: Any, option: int = 0) -> bytes:
    """Return `value` as JSON text. option: orjson's flags.

    Raises TypeError for types that JSON lacks, and for a value that is nested too deeply.
    """
    try:
        return orjson.dumps(value, default=_exact_fragment, option=option)
    except TypeError as error:
        try:
            exact = _with_long_integers(value)
        except RecursionError:
            raise error from None
        return orjson.dumps(exact, default=_exact_fragment, option=option)


def _exact_fragment(value: Any) -> orjson.Fragment:
    if isinstance(value, ExactFloat):
        return orjson.Fragment(value.text)
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def _with_long_integers(value: Any) -> Any:
    """Return a copy of nested `value` in which integers beyond 64 bits are orjson Fragments."""
    if isinstance(value, dict):
        return {key: _with_long_integers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_long_integers(inner) for inner in value]
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 64:
        return orjson.Fragment(str(value))
    return value


def _refuse(word: str) -> Any:
    raise ValueError(_not_json(word))


def _not_json(word: str) -> str:
    return f"{word}, which Python's json writes, is not JSON: write null"
