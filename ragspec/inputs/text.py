"""Inputs that are text: JSON Lines, JSON documents, CSV and TSV.

>>> for row in TextSource("questions.csv.gz"): row.number, row.raw, row.value

The text may come from a file, stdin (-), an archive or a URL. Its first line shows the format. A source whose reads
may block (a pipe, a terminal) is read on a thread: see live.py.
"""

from __future__ import annotations

import csv
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

from ragspec.errors import ConfigError
from ragspec.inputs.base import Row
from ragspec.inputs.columns import ALL, Columns
from ragspec.inputs.content import Stream, is_text
from ragspec.inputs.document import QUESTIONS, listed_under
from ragspec.inputs.live import Live
from ragspec.inputs.storage import is_url
from ragspec.json_text import JSONDecodeError, loads

DELIMITERS = {"csv": ",", "tsv": "\t"}
OPEN = (b"{", b"[", b",", b":")  # ends of a line of JSON that continues on the next one
OTHERS = "\t;|"  # delimiters of a .csv besides the comma


class Reader(Protocol):
    """Reads rows from a text of one format."""

    def rows(self) -> Iterator[Row]: ...

    def where(self, number: int) -> str:
        """Return how messages name row `number`."""


class TextSource:
    """The records of one text.

    format: "jsonl", "json", "csv", "tsv" or "auto". name: with "auto", the format that the file's name promises.
    stream: the text, if it is open already. Raises ConfigError.
    """

    def __init__(
        self,
        path: str,
        columns: Columns = ALL,
        options: Mapping[str, Any] | None = None,
        *,
        format: str = "auto",
        name: str = "jsonl",
        stream: Stream | None = None,
    ) -> None:
        self.path = path
        self._given = (columns, options, format, name)
        self._columns = columns
        self._format, self._name = format, name
        self._stack = ExitStack()
        self._stream = self._stack.enter_context(stream or Stream(path, options))
        self._reader: Reader | None = None
        self._delimiter = ","
        if self._stream.pipe is None:
            try:
                self._open()
            except BaseException:
                self._stack.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _open(self) -> Reader:
        """Return the reader for the text's format; waits for the first line of a pipe."""
        stream = self._stream if self._stream.file is not None else self._stream.look()
        assert stream.file is not None
        if stream.kind:
            raise ConfigError(f"{self.path}: {_not_text(stream.kind, self._format, pipe=stream.pipe is not None)}")
        format, delimiter = self._format, DELIMITERS.get(self._format, ",")
        if format == "auto":
            format, delimiter = format_of(stream.head, stream.whole, self._name, self._columns)
        if not is_text(stream.head) or (format == "jsonl" and stream.head and not _is_json(stream.head)):
            stream.check_name()
        if not self.waits and b"\0" in stream.head and not _is_json(stream.head) and not _has_line(stream.head):
            raise ConfigError(f"{self.path}: is neither text nor in a format that is read")
        if format in DELIMITERS:
            from ragspec.inputs.delimited import DelimitedReader

            self._delimiter = delimiter
            self._reader = DelimitedReader(stream.file, self.path, self._columns, delimiter)
        elif format == "json":
            from ragspec.inputs.document import DocumentReader

            if stream.head.startswith(BOM_UTF8):
                stream.file.read(len(BOM_UTF8))
            self._reader = DocumentReader(stream.file, self.path, self._columns)
        else:
            from ragspec.inputs.jsonl import LineReader

            self._reader = LineReader(stream.file, self.path, self._columns)
        self._format = format
        return self._reader

    def __iter__(self) -> Iterator[Row]:
        if self._stream.pipe is None:
            return self._rows()
        live = Live(self._rows(), self._stream.pipe, size=lambda row: len(row.raw))
        self._stack.callback(live.close)
        return live

    def _rows(self) -> Iterator[Row]:
        yield from (self._reader or self._open()).rows()

    @property
    def names(self) -> list[str]:
        """The columns of CSV and TSV."""
        return getattr(self._reader, "names", [])

    @property
    def waits(self) -> bool:
        """Whether it is a pipe: reads may block, and it can be read only once."""
        return self._stream.pipe is not None

    def reopen(self) -> TextSource | None:
        """Return the same source for a second reading; None for a pipe, a zip member or a URL."""
        if self.waits or self._stream.is_member or self.path == "-" or is_url(self.path):
            return None
        columns, options, format, name = self._given
        return type(self)(self.path, columns, options, format=format, name=name)

    def count(self) -> int | None:
        """Return how many lines or rows a local, uncompressed JSON Lines, CSV or TSV file has; else None."""
        plain = not self._stream.packed and not self._stream.is_member and self._stream.encoding is None
        path = Path(self.path)
        if not plain or self.path == "-" or is_url(self.path) or not path.is_file():
            return None
        if self._format in DELIMITERS:
            from ragspec.inputs.delimited import rows_in

            return rows_in(path, self._delimiter)
        if self._format != "jsonl":
            return None
        with path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))

    def where(self, number: int) -> str:
        """Return "path:line", as compilers do; "path: row n" where a row may have several lines."""
        return self._reader.where(number) if self._reader is not None else f"{self.path}:{number}"


def format_of(head: bytes, whole: bool, name: str, columns: Columns) -> tuple[str, str]:
    """Return the format of a text that begins with `head`, and its delimiter.

    whole: whether `head` is the entire text. name: the format that the file's name promises.
    """
    text = _begun(head)
    line, _, rest = text.partition(b"\n")
    if _is_json(head):
        ended = whole or len(line) < len(text)
        if _is_document(text, line, rest, name, ended, whole):
            return "json", ","
        if name not in DELIMITERS or text[:1] == b"{" or _value(line) is not None:
            return "jsonl", ","
    header = line.decode("utf-8", "replace")
    if name in DELIMITERS:
        return name, _delimiter_of(header, DELIMITERS[name])
    delimiter = next((mark for mark in f",{OTHERS}" if _is_header(header, mark, columns)), None)
    if rest.lstrip()[:1] == b"{":  # JSON Lines with an invalid first line
        delimiter = None
    return ("jsonl", ",") if delimiter is None else ("csv", delimiter)


def _begun(head: bytes) -> bytes:
    """Return a text without leading marks and spaces."""
    return head.removeprefix(BOM_UTF8).lstrip(b" \t\r\n\x1e")


def _is_json(head: bytes) -> bool:
    return _begun(head)[:1] in (b"{", b"[")


def _is_document(text: bytes, line: bytes, rest: bytes, name: str, ended: bool, whole: bool) -> bool:
    """Return whether a text that begins like JSON is a document rather than JSON Lines."""
    alone = whole and not rest.strip()
    value = _value(line) if ended else None
    if value is not None and not alone and rest.lstrip()[:1] in (b"{", b"["):
        return False
    if text[:1] == b"[":
        return text[1:].lstrip()[:1] in (b"{", b"]") or (value is None and name == "json")
    if value is not None:
        return alone and QUESTIONS.isdisjoint(value) and listed_under(line) is not None
    if not ended:
        return listed_under(text) is not None
    # a truncated line of JSON Lines may end in the same way, but the next line then begins with a brace
    opens = line.rstrip()[-1:] in OPEN if rest.strip() else line.strip() == b"{"
    return opens and (name == "json" or rest.lstrip()[:1] != b"{") and not _has_line(rest)


def _has_line(rest: bytes) -> bool:
    """Return whether one of these lines is an object on its own that does not continue the line before."""
    before = b","
    for line in rest.split(b"\n"):
        if line.startswith(b"{") and before not in OPEN and isinstance(_value(line), dict):
            return True
        before = line.rstrip()[-1:] or before
    return False


def _value(line: bytes) -> Any:
    """Return the JSON value of a line, None if it is invalid."""
    try:
        return loads(line)
    except JSONDecodeError:
        return None


def _delimiter_of(header: str, promised: str) -> str:
    """Return the delimiter of a header: the promised one, unless only another one occurs."""
    if promised in header:
        return promised
    return next((other for other in ("," if promised != "," else "", *OTHERS) if other and other in header), promised)


def _is_header(header: str, delimiter: str, columns: Columns) -> bool:
    """Return whether a line is a header of at least two columns, one of which can be a prompt."""
    names = next(csv.reader([header], delimiter=delimiter), [])
    return len(names) > 1 and columns.makes_records(name.strip() for name in names)


def _not_text(kind: str, format: str, *, pipe: bool) -> str:
    what = {"zip": "a zip archive", "parquet": "a Parquet file", "arrow": "an Arrow file"}[kind]
    if pipe:
        return f"is {what}, which cannot be read from a pipe; give the file itself"
    return f"is {what}, not {format}; leave input.format out"
