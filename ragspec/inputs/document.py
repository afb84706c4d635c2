"""JSON documents: an array of records, an object with such a list (`{"data": [...]}`), or objects over many lines.

>>> list(DocumentReader(io.BytesIO(b'[{"query": "Why?"}]'), "a.json", ALL).rows())[0].value
{'query': 'Why?'}

The text is split into records by brackets and quotes before a record is parsed. So memory stays constant, and invalid
JSON is an error of its record, as in JSON Lines. An article of SQuAD becomes one row per question. Limit: a record
has at most 256 MiB.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import IO, Any

from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import InputRow, row_of
from ragspec.inputs.columns import GUESSES, Columns
from ragspec.inputs.content import DAMAGES, failure_reason
from ragspec.inputs.record import OWN_FIELDS, REFERENCES, SOURCES
from ragspec.json_text import JSONDecodeError, loads

LONGEST = 256 << 20  # bytes of a record
CHUNK = 64 << 10  # bytes of a read
QUESTIONS = {*SOURCES, *GUESSES["query"], "body"}  # keys that make an object a record
# keys of a record whose lists of objects are not records
INSIDE = {*OWN_FIELDS, *REFERENCES, *GUESSES["contexts"], *GUESSES["messages"], "tools", "tool_calls"}
INSIDE |= {"copied", "logprobs", "parsed"}  # of an output's line
STRUCTURE = re.compile(rb'"|[\[{]+|[\]}]+|,')
INSIDE_VALUE = re.compile(rb'"|[\[{]+|[\]}]+')
IN_STRING = re.compile(rb'["\\]')
NO_SPACE = re.compile(rb"[^ \t\r\n]")


class DocumentReader:
    """The records of one JSON text. path: for messages."""

    def __init__(self, file: IO[bytes], path: str, columns: Columns) -> None:
        self._file = file
        self._path = path
        self._columns = columns

    def where(self, number: int) -> str:
        return f"{self._path}: record {number}"

    def rows(self) -> Iterator[InputRow]:
        number = 0
        try:
            for raw in records(_Scanner(self._file)):
                for value in _values(raw):
                    number += 1
                    yield row_of(number, value, self._columns)
        except _Broken as error:
            raise ConfigError(f"{self.where(number + 1)}: {error}") from None
        except (OSError, *DAMAGES) as error:
            raise ConfigError(f"{self.where(number + 1)}: {failure_reason(error)}") from None


def listed_under(head: bytes) -> str | None:
    """Return the key of an object's list of records, None if the object is a record. head: the text's first bytes."""
    scanner = _Scanner(io.BytesIO(head))
    try:
        return scanner.next_list() if scanner.take() == b"{" else None
    except _Broken:  # the head ends before the object does
        return None


def records(scanner: _Scanner) -> Iterator[bytes]:
    """Yield the records of a text: array items, items of an object's list, and objects without such a list."""
    while (byte := scanner.peek()) != b"":
        scanner.drop()
        if byte in b"]},:":
            raise _Broken(f"not valid JSON ({byte.decode()} is not expected)")
        if byte == b"[":
            scanner.take()
            yield from _items(scanner)
        elif byte == b"{":
            yield from _of_object(scanner)
        else:
            yield scanner.value()


def _items(scanner: _Scanner) -> Iterator[bytes]:
    """Yield an array's items, from after its opening bracket to after its closing one."""
    if scanner.peek() == b"]":
        scanner.take()
        return
    while True:
        scanner.drop()
        yield scanner.value()
        byte = scanner.take()
        if byte == b"]":
            return
        if byte != b",":
            raise _Broken("not valid JSON (a comma or a bracket is missing before it)" if byte else CUT)


def _of_object(scanner: _Scanner) -> Iterator[bytes]:
    """Yield the items of an object's list of records, or the object if it has no such list."""
    scanner.take()
    under = scanner.next_list()
    if under is None:
        yield scanner.seen()
        return
    yield from _items(scanner)
    while (key := scanner.key()) is not None:
        if key in QUESTIONS:
            raise _Broken(f'the object has "{key}" next to its list "{under}", whose items were read as records')
        if scanner.opens_list(key):
            raise _Broken(f'the object has two lists of records, "{under}" and "{key}"; put each in a separate file')
        scanner.value()
        scanner.drop()


def _values(raw: bytes) -> Iterator[Any]:
    """Yield the value of a record, or a RecordError; for a SQuAD article, one value per question."""
    try:
        value = loads(raw)
    except JSONDecodeError as error:
        yield RecordError(f"not valid JSON ({error})")
        return
    paragraphs = value.get("paragraphs") if isinstance(value, dict) else None
    if not isinstance(paragraphs, list) or not paragraphs or not all(map(_is_squad, paragraphs)):
        yield value
        return
    title = {"title": value["title"]} if "title" in value else {}
    for paragraph in paragraphs:
        for question in paragraph["qas"]:
            yield {**title, "context": paragraph["context"], **question, **_as_on_the_hub(question.get("answers"))}


def _is_squad(paragraph: Any) -> bool:
    questions = paragraph.get("qas") if isinstance(paragraph, dict) else None
    return isinstance(questions, list) and "context" in paragraph and all(isinstance(each, dict) for each in questions)


def _as_on_the_hub(answers: Any) -> dict[str, Any]:
    if not isinstance(answers, list) or not all(isinstance(each, dict) for each in answers):
        return {}
    return {"answers": {key: [each.get(key) for each in answers] for key in ("text", "answer_start")}}


CUT = "the file ends in the middle of it"


class _Broken(Exception):
    """The text is invalid JSON, and the start of the next record is unknown."""


class _Scanner:
    """Finds the ends of JSON values without parsing them. Buffers what was read since the last `drop`."""

    def __init__(self, file: Any) -> None:
        self._read = getattr(file, "read1", file.read)  # does not block for more than a pipe has
        self._data = bytearray()
        self._at = 0

    def peek(self) -> bytes:
        """Return the next non-space byte without consuming it, b"" at the end."""
        return self._find(NO_SPACE, ahead=True)

    def take(self) -> bytes:
        """Consume the next non-space byte and return it."""
        return self._find(NO_SPACE)

    def drop(self) -> None:
        """Discard the buffer up to the current position."""
        del self._data[: self._at]
        self._at = 0

    def seen(self) -> bytes:
        """Return the buffer up to the current position."""
        return bytes(self._data[: self._at])

    def value(self) -> bytes:
        """Consume the next value and return it."""
        self.peek()
        begin, depth = self._at, 0
        while True:
            found = self._find(INSIDE_VALUE if depth else STRUCTURE)
            if found == b'"':
                self._end_string()
            elif found[:1] in (b"[", b"{") and found:
                depth += len(found)
            elif found[:1] in (b"]", b"}") and depth:
                over = max(0, len(found) - depth)  # brackets that close an outer value
                depth -= len(found) - over
                self._at -= over
            elif found == b"" and (depth or not self._data[begin:].strip()):
                raise _Broken(CUT)
            else:  # a number or a word ends before this
                self._at -= len(found)
            if not depth:
                return bytes(self._data[begin : self._at])

    def key(self) -> str | None:
        """Consume an object's next key and its colon, and return the key; None at the object's end."""
        if self.peek() == b",":
            self.take()
        byte = self.take()
        if byte == b"}":
            return None
        if byte != b'"':
            raise _Broken("not valid JSON (a key is missing)" if byte else CUT)
        begin = self._at - 1
        self._end_string()
        try:
            key: str = loads(bytes(self._data[begin : self._at]))
        except JSONDecodeError as error:
            raise _Broken(f"not valid JSON ({error})") from None
        if (byte := self.take()) != b":":
            raise _Broken("not valid JSON (a colon is missing)" if byte else CUT)
        return key

    def next_list(self) -> str | None:
        """Enter an object's list of records and return its key; without one, consume the object and return None."""
        record = False
        while (key := self.key()) is not None:
            record |= key in QUESTIONS
            if not record and self.opens_list(key):
                return key
            self.value()
        return None

    def opens_list(self, key: str) -> bool:
        """Return whether a list of records comes next, and enter it if so."""
        if key in INSIDE or self.peek() != b"[":
            return False
        at = self._at
        self.take()
        if self.peek() == b"{":
            return True
        self._at = at
        return False

    def _end_string(self) -> None:
        while (byte := self._find(IN_STRING)) != b'"':
            if not byte or not self._has(self._at + 1):
                raise _Broken(CUT)
            self._at += 1  # the escaped character

    def _find(self, pattern: re.Pattern[bytes], *, ahead: bool = False) -> bytes:
        """Return the next match and move behind it, or before it with `ahead`; b"" at the end."""
        while (match := pattern.search(self._data, self._at)) is None:
            self._at = len(self._data)
            if not self._has(self._at + 1):
                return b""
        self._at = match.start() if ahead else match.end()
        return match[0]

    def _has(self, size: int) -> bool:
        """Return whether the buffer has this many bytes, reading more if needed."""
        while len(self._data) < size:
            more = self._read(CHUNK)
            if not more:
                return False
            self._data += more
            if len(self._data) > LONGEST + CHUNK:
                raise _Broken(f"it is longer than {LONGEST >> 20} MiB")
        return True
