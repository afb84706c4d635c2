"""Text inputs: JSON Lines, JSON documents, CSV, TSV and plain questions, from a file, stdin (-), an archive or a URL.

>>> for row in TextSource("questions.csv.gz"): row.number, row.raw, row.value

The first line shows the format. A source whose reads may block (a pipe, a terminal) is read on a thread (feed.py).
Limit: a line of JSON Lines longer than 256 MiB is an error of its record, one longer than 4 GiB ends the run.
"""

from __future__ import annotations

import csv
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Protocol, Self

import jsonlines

from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import InputRow
from ragspec.inputs.columns import ALL, Columns
from ragspec.inputs.content import DAMAGES, Stream, failure_reason, is_text
from ragspec.inputs.document import QUESTIONS, listed_under
from ragspec.inputs.feed import LivePipe
from ragspec.inputs.storage import is_url
from ragspec.json_text import JSONDecodeError, loads

DELIMITERS = {"csv": ",", "tsv": "\t"}
OPEN = (b"{", b"[", b",", b":")  # last bytes of a line of JSON that continues on the next line
OTHERS = "\t;|"  # delimiters of a .csv other than the comma
SEPARATOR = re.compile(rf"sep=([,{OTHERS}])")  # a line that Excel writes and reads before the header
# how JSON begins that can be records; a question may begin "[1] ..."
RECORDS = re.compile(rb'\[\s*(\{|\]\s*$)|\{\s*["}]')


class Reader(Protocol):
    """Reads rows from a text of one format."""

    def rows(self) -> Iterator[InputRow]: ...

    def where(self, number: int) -> str:
        """Return the location of row `number` for messages."""


class TextSource:
    """The records of one text.

    Args:
        path: the input's name.
        columns: the mapping of its fields.
        options: storage options for a URL.
        format: "jsonl", "json", "csv", "tsv", "text" or "auto".
        name: the format that the file's name suggests; used with "auto".
        stream: the text, if it is already open.

    Raises:
        ConfigError: the text cannot be opened or read.
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
            raise ConfigError(f"{self.path}: is neither text nor a supported format")
        if format in DELIMITERS:
            from ragspec.inputs.delimited import DelimitedReader

            self._delimiter = delimiter
            self._reader = DelimitedReader(stream.file, self.path, self._columns, delimiter)
        elif format == "json":
            from ragspec.inputs.document import DocumentReader

            if stream.head.startswith(BOM_UTF8):
                stream.file.read(len(BOM_UTF8))
            self._reader = DocumentReader(stream.file, self.path, self._columns)
        elif format == "text":
            self._reader = QuestionReader(stream.file, self.path)
        else:
            self._reader = LineReader(stream.file, self.path, self._columns)
        self._format = format
        return self._reader

    def __iter__(self) -> Iterator[InputRow]:
        if self._stream.pipe is None:
            return self._rows()
        live = LivePipe(self._rows(), self._stream.pipe, size=lambda row: len(row.raw))
        self._stack.callback(live.close)
        return live

    def _rows(self) -> Iterator[InputRow]:
        yield from (self._reader or self._open()).rows()

    @property
    def names(self) -> list[str]:
        """Return the column names of CSV and TSV."""
        return getattr(self._reader, "names", [])

    @property
    def waits(self) -> bool:
        """Return whether the input is a pipe: reads may block, and it can be read only once."""
        return self._stream.pipe is not None

    def reopen(self) -> TextSource | None:
        """Return a second source over the same text; None for a pipe, a zip member or a URL."""
        if self.waits or self._stream.is_member or self.path == "-" or is_url(self.path):
            return None
        columns, options, format, name = self._given
        return type(self)(self.path, columns, options, format=format, name=name)

    def count(self) -> int | None:
        """Return the number of lines, questions or rows of a local, uncompressed text; None for other formats."""
        plain = not self._stream.packed and not self._stream.is_member and self._stream.encoding is None
        path = Path(self.path)
        if not plain or self.path == "-" or is_url(self.path) or not path.is_file():
            return None
        if self._format in DELIMITERS:
            from ragspec.inputs.delimited import rows_in

            return rows_in(path, self._delimiter)
        if self._format not in ("jsonl", "text"):
            return None
        with path.open("rb") as file:
            if self._format == "text":
                return sum(1 for _ in QuestionReader(file, self.path).rows())
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))

    def where(self, number: int) -> str:
        """Return "path:line", as compilers do; "path: row n" for formats whose rows may span lines."""
        return self._reader.where(number) if self._reader is not None else f"{self.path}:{number}"


def format_of(head: bytes, whole: bool, name: str, columns: Columns) -> tuple[str, str]:
    """Return the format and the delimiter of a text that begins with `head`.

    whole: `head` is the entire text. name: the format that the file's name suggests.
    """
    text = _stripped(head)
    line, _, rest = text.partition(b"\n")
    if _is_json(head):
        if name == "text" and not RECORDS.match(text):
            return "text", ","
        ended = whole or len(line) < len(text)
        if _is_document(text, line, rest, name, ended, whole):
            return "json", ","
        if name == "text" and ended and _value(line) is None and rest.lstrip()[:1] != b"{":
            return "text", ","
        if name not in DELIMITERS or text[:1] == b"{" or _value(line) is not None:
            return "jsonl", ","
    header = line.partition(b"\r")[0].decode("utf-8", "replace")
    if said := SEPARATOR.fullmatch(header):
        return name if name in DELIMITERS else "csv", said[1]
    if name in DELIMITERS:
        return name, _delimiter_of(header, DELIMITERS[name])
    delimiter = next((mark for mark in f",{OTHERS}" if _is_header(header, mark, columns)), None)
    if rest.lstrip()[:1] == b"{":  # JSON Lines with an invalid first line
        return "jsonl", ","
    if delimiter is not None:
        return "csv", delimiter
    return name if name == "text" else "jsonl", ","


def _stripped(head: bytes) -> bytes:
    """Return a text without leading marks and white space."""
    return head.removeprefix(BOM_UTF8).lstrip(b" \t\r\n\x1e")


def _is_json(head: bytes) -> bool:
    return _stripped(head)[:1] in (b"{", b"[")


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
    """Return whether a line is a complete object that does not continue the line before."""
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
    """Return the delimiter of a header: the promised one, unless only another one occurs in it."""
    if promised in header:
        return promised
    return next((other for other in ("," if promised != "," else "", *OTHERS) if other and other in header), promised)


def _is_header(header: str, delimiter: str, columns: Columns) -> bool:
    """Return whether a line is a header of at least two columns, one of them a possible prompt."""
    names = next(csv.reader([header], delimiter=delimiter), [])
    return len(names) > 1 and columns.makes_records(name.strip() for name in names)


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte {error.start + 1} is 0x{error.object[error.start]:02x}); save the file as UTF-8"


def _not_text(kind: str, format: str, *, pipe: bool) -> str:
    what = {"zip": "a zip archive", "parquet": "a Parquet file", "arrow": "an Arrow file"}[kind]
    if pipe:
        return f"is {what}, which cannot be read from a pipe; give the file itself"
    return f"is {what}, not {format}; leave input.format out"


# -- JSON Lines ------------------------------------------------------------------------------------

LONGEST = 256 << 20  # bytes of a line
ENDLESS = 16 * LONGEST  # bytes after which the run ends
PIECE = 1 << 20  # lines are read in pieces, so that an endless one is noticed before it fills the memory


class QuestionReader:
    """The non-blank lines of a plain text, each a question; they end as any system ends them. path: for messages.

    A line that is not UTF-8 yields a RecordError as its value.
    """

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._file = file
        self._path = path

    def rows(self) -> Iterator[InputRow]:
        for number, raw in enumerate(self._lines(), 1):
            raw = raw.removeprefix(BOM_UTF8) if number == 1 else raw
            if raw.strip():
                value: Any
                try:
                    value = {"query": raw.decode().strip()}
                except UnicodeDecodeError as error:
                    value = RecordError(_not_utf8(error))
                yield InputRow(number, raw, value)

    def _lines(self) -> Iterator[bytes]:
        """Yield lines without their ends: LF, CR LF or CR."""
        number = 1
        try:
            while raw := self._file.readline(LONGEST):
                for line in raw.removesuffix(b"\n").removesuffix(b"\r").split(b"\r"):
                    yield line
                    number += 1
        except (OSError, *DAMAGES) as error:
            raise ConfigError(f"{self.where(number)}: {failure_reason(error)}") from None

    def where(self, number: int) -> str:
        """Return "path:line", as compilers do."""
        return f"{self._path}:{number}"


class LineReader:
    """The non-empty lines of a text; `raw` is a line without its end. path: for messages.

    A line that is too long or not JSON yields a RecordError as its value.
    """

    def __init__(self, file: IO[bytes], path: str, columns: Columns) -> None:
        self._file = file
        self._path = path
        self._columns = columns
        self._too_long = 0  # bytes of the last line, if it has too many

    def rows(self) -> Iterator[InputRow]:
        number, raw = 0, b""

        def keep() -> Iterator[bytes]:
            """Pass every line to the reader and keep it for hashing and messages."""
            nonlocal number, raw
            while raw := self._read_line(number + 1):
                number += 1
                yield raw

        reader = jsonlines.Reader(keep(), loads=loads)
        while True:
            value: Any
            try:
                value = self._columns.of(reader.read(allow_none=True, skip_empty=True))
            except EOFError:
                return
            except jsonlines.InvalidLineError as error:
                value = RecordError(self._reason_for(error, raw))
            except RecordError as error:
                value = error
            yield InputRow(number, raw.rstrip(b"\r\n"), value)

    def _read_line(self, number: int) -> bytes:
        """Return the next line with its end, b"" at the end; for a line that is too long, a digest, which is not JSON.

        Raises ConfigError if it cannot be read.
        """
        pieces: list[bytes] = []
        size, found, self._too_long = 0, blake2b(digest_size=16), 0
        try:
            while piece := self._file.readline(PIECE):
                size += len(piece)
                pieces.append(piece)
                if size > LONGEST:  # keep only its digest
                    for each in pieces:
                        found.update(each)
                    pieces, self._too_long = [], size
                if size > ENDLESS:
                    raise ConfigError(
                        f"{self.where(number)}: the line is longer than {ENDLESS >> 30} GiB; is this JSONL, one record "
                        "per line?"
                    )
                if piece.endswith(b"\n"):
                    break
        except (OSError, *DAMAGES) as error:
            raise ConfigError(f"{self.where(number)}: {failure_reason(error)}") from None
        if self._too_long:
            return f"~{found.hexdigest()}\n".encode()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _reason_for(self, error: jsonlines.InvalidLineError, line: bytes) -> str:
        """Return why the last line is invalid."""
        if self._too_long:
            return f"the line has {self._too_long >> 20:,} MiB, {LONGEST >> 20} at most; one record per line"
        cause = error.__cause__
        if isinstance(cause, UnicodeDecodeError):
            return _not_utf8(cause)
        if isinstance(cause, JSONDecodeError) and cause.pos >= len(cause.doc.rstrip("\r\n")) and line.strip():
            where = "inside a string" if "in string" in cause.msg else "too early"
            return f"not valid JSON (the line ends {where}: cut off?); each line must be one JSON object"
        plain = "" if line.lstrip()[:1] in (b"{", b"[", b'"') else " (input.format: text reads a question a line)"
        return f"not valid JSON ({cause}); each line must be one JSON object{plain}"

    def where(self, number: int) -> str:
        """Return "path:line", as compilers do."""
        return f"{self._path}:{number}"
