"""Numbers of users keep every digit, and everything else is read as orjson reads it."""

import copy
import json
import pickle
from decimal import Decimal

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.json_text import ExactFloat, JSONDecodeError, dumps, loads

WHOLE = ["12345678901234567890123", "18446744073709551616", "-9223372036854775809", "9" * 400, "1234567890123456789"]
DECIMAL = [
    "0.12345678901234567890123",
    "1e400",
    "-1E+400",
    "1e-400",
    "1e-99999999999999999999",
    "0e99999999999999999999",
    "123456789012345678.25",
    "0.1000000000000000055511",
]


@pytest.mark.parametrize("text", WHOLE + DECIMAL)
def test_a_number_keeps_its_digits_wherever_it_goes(text):
    line = b'{"a":[{"n":%s}]}' % text.encode()
    value = loads(line)
    assert dumps(value) == line
    number = value["a"][0]["n"]
    assert str(number) == f"{number}" == text
    assert str(pickle.loads(pickle.dumps(number))) == str(copy.deepcopy(number)) == text


@pytest.mark.parametrize(
    "text", ["0.1", "0.30000000000000004", "1e22", "5e-324", "1.7976931348623157e308", "1.50000000000000000"]
)
def test_a_decimal_that_a_double_has_stays_a_double(text):
    assert type(loads(text)) is float
    assert loads(text) == float(text)


def test_an_exact_decimal_counts_as_a_number():
    number = loads("0.12345678901234567890123")
    assert isinstance(number, ExactFloat)
    assert number * 2 == 0.12345678901234568 * 2
    assert f"{number:.3f}" == "0.123"


numbers = st.one_of(
    st.integers(min_value=-(10**40), max_value=10**40),
    st.decimals(allow_nan=False, allow_infinity=False).map(lambda d: Decimal(str(d))),
)


@given(st.lists(numbers), st.text(st.characters(exclude_categories=["Cs"])))
def test_any_number_is_the_same_after_a_round(values, text):
    line = json.dumps({"text": text, "n": 0}).replace(": 0}", ": [" + ", ".join(map(str, values)) + "]}")
    found = json.loads(dumps(loads(line)), parse_float=Decimal)
    assert found["n"] == values
    assert found["text"] == text


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.integers(-(2**63), 2**64 - 1),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_values)
def test_what_orjson_reads_without_rounding_is_read_alike(value):
    try:
        line = orjson.dumps(value)
    except TypeError:  # half characters
        return
    assert loads(line) == orjson.loads(line)
    assert dumps(loads(line)) == line


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": NaN, "n": 12345678901234567890}',
        b'{"a": Infinity, "n": 12345678901234567890}',
        b'{"a": "\\ud800", "n": 12345678901234567890}',
        b'{"a": 12345678901234567890, "b": }',
        b"\xff12345678901234567890",
        b"[" * 5000 + b"12345678901234567890",
        b"9" * 5000,
        b'{"a": 012345678901234567890}',
        b'{"a": "tab\t12345678901234567890"}',
    ],
)
def test_what_is_no_json_is_an_error_of_its_own(text):
    with pytest.raises(JSONDecodeError):
        loads(text)
    assert issubclass(JSONDecodeError, ValueError)


def test_what_json_cannot_hold_is_a_type_error():
    with pytest.raises(TypeError):
        dumps({"a": object(), "n": 10**30})


def test_what_is_nested_too_deeply_to_be_written_is_a_type_error():
    with pytest.raises(TypeError, match="Recursion limit"):
        dumps(loads(b"[" * 1000 + b"]" * 1000))


@pytest.mark.parametrize(
    ("text", "word", "column"),
    [
        (b'{"a": NaN}', "NaN", 7),
        ('{"\u00e9": [1, -Infinity]}', "-Infinity", 11),
        (b'{"a": Infinity, "b": 12345678901234567890}', "Infinity", 1),
    ],
)
def test_what_pythons_json_writes_beyond_json_is_named(text, word, column):
    with pytest.raises(
        JSONDecodeError, match=f"{word}, which Python's json writes, is not JSON: write null: line 1 column {column} "
    ):
        loads(text)
