"""An output as one CSV file: a header, then a row per record, appended as records finish.

    >>> store = CsvFile(Path("answers.csv"), ["query"]); store.append(b'{"id": "q1", "output": "Ann."}\\n')

Columns of text and numbers hold what most readers want; lists and objects are JSON in their cells, and fields without a
column are together in `details`. A cell may contain line ends, so a row may have several lines. Source: RFC 4180.
"""

from __future__ import annotations

import csv
import io
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError
from ragspec.json_text import JSONDecodeError, dumps, loads
from ragspec.outputs.base import Change
from ragspec.outputs.ledger import Drop, Finished
from ragspec.outputs.line_file import Appended

COLUMNS = (
    *("id", "query", "output", "finish_reason", "prompt_tokens", "output_tokens", "latency_s", "contexts", "passages"),
    *("metadata", "error", "details", "fingerprint"),
)
OPTIONAL = {"query": "query", "passages": "contexts"}  # column: what output.include calls it
NUMBERS = {"prompt_tokens", "output_tokens", "latency_s"}
NEEDED = {"id", "output", "error", "details", "fingerprint"}  # columns without which a row loses something
AS_JSON = {"contexts", "passages", "metadata", "error", "details"}
EMPTY: dict[str, Any] = {"contexts": [], "passages": [], "metadata": {}}  # of answers, where their cell is empty
ROW_END = re.compile(rb",[0-9a-f]{24}\r?\n")  # a fingerprint in the last column
csv.field_size_limit(256 << 20)


class CsvFile(Appended):
    """A store in one local CSV file. include: `output.include`. A file that has a header keeps its columns."""

    def __init__(self, path: Path, include: Sequence[str] = ()) -> None:
        super().__init__(path)
        self._columns = [name for name in COLUMNS if OPTIONAL.get(name, name) in include or name not in OPTIONAL]
        self._header = encoded(self._columns)

    def append(self, line: bytes) -> int:
        """Append the row of an output line."""
        row = encoded(cells_of(loads(line), self._columns))
        return super().append(row if self.size else self._header + row)

    def finished(self, drop: Drop | None = None) -> Iterator[Finished]:
        """Remove a partial last row and the rows to `drop`, and yield what the others finish."""
        self._header = next(iter(self), (0, self._header))[1]
        self._columns = decoded(self._header.removeprefix(BOM_UTF8))
        if lost := sorted(NEEDED - set(self._columns)):
            raise ConfigError(
                f"{self.path}: its header is no longer ragspec's ({lost[0]} is missing; edited in a spreadsheet?); "
                "choose another --output, or start over with --no-resume"
            )
        self.cut_torn_line()
        rows = iter(self)
        next(rows, None)
        if drop is not None:
            kept = [row for _, row in rows if not drop(self._finished(row))]
            self.replace([self._header, *kept] if self.size else [])
            rows = iter(self)
            next(rows, None)
        return (self._finished(row) for _, row in rows)

    def rewrite(self, change: Change, more: Iterable[bytes]) -> None:
        """Replace all rows at once by what `change` makes of their lines, and the rows of `more`."""

        def rows() -> Iterator[bytes]:
            yield self._header
            for _, row in islice(self, 1, None):
                line = self._line(row)
                new = change(line)
                if new is not None:
                    yield row if new == line else encoded(cells_of(loads(new), self._columns))
            for line in more:
                yield encoded(cells_of(loads(line), self._columns))

        self.replace(rows())

    def cut_torn_line(self) -> None:
        """Remove a last row that is not complete, which a killed run leaves."""
        end = 0
        for begin, row in self:
            end = begin + len(row)
        if end < self.size:
            self._check_torn(end)
            self._file.truncate(end)

    def _check_torn(self, begin: int) -> None:
        """Raise ConfigError if whole rows are behind `begin`: then a quote was left open there, not a row."""
        if ROW_END.search(self.read(begin, self.size - begin)):
            line = self.read(0, begin).count(b"\n") + 1
            raise ConfigError(
                f"{self.path}:{line}: a quote that opens in this row is never closed, and there are rows behind it "
                "(edited?); correct it, choose another --output, or start over with --no-resume"
            )

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield each complete row, the header too, with its offset. Rows end where csv.reader ends them."""
        taken: list[bytes] = []
        ended = False

        def lines() -> Iterator[str]:
            nonlocal ended
            for _, line in Appended.__iter__(self):
                taken.append(line)
                yield line.decode(errors="replace")
            ended = True

        begin = 0
        try:
            for _ in csv.reader(lines()):
                if ended or not taken[-1].endswith(b"\n"):  # the last row is not complete
                    return
                row = b"".join(taken)
                yield begin, row
                begin += len(row)
                taken.clear()
        except csv.Error as error:
            raise ConfigError(
                f"{self.path}: cannot be read as CSV ({error}; edited?); correct it, choose another --output, or start "
                "over with --no-resume"
            ) from None

    def _finished(self, row: bytes) -> Finished:
        return Finished.of(self._line(row))

    def _line(self, row: bytes) -> bytes:
        """Return a row as an output line, without its end."""
        line = line_of(dict(zip(self._columns, decoded(row), strict=False)))
        if "error" not in line:
            line = {name: value for name, value in EMPTY.items() if name in self._columns} | line
        return dumps(line)


def written_here(path: Path) -> bool:
    """Return whether a file is such an output."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        return False
    with path.open("rb") as file:
        return set(decoded(file.readline().removeprefix(BOM_UTF8))) >= NEEDED


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of such an output as output lines. Raises ConfigError for a row that is not whole."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            columns = next(rows, [])
            for row in rows:
                if row in ([], columns):  # an empty line; the header of a file that was appended
                    continue
                if len(row) != len(columns):
                    raise csv.Error(f"it has {len(row)} cells, the header has {len(columns)}")
                yield line_of(dict(zip(columns, row, strict=True)))
        except csv.Error as error:
            where = f"{path}:{rows.line_num}"
            raise ConfigError(f"{where}: the row that ends here is not whole ({error}; cut off?)") from None


def encoded(cells: Iterable[Any]) -> bytes:
    """Return a row with its line end."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)  # a cell is quoted if it has either
    return text.getvalue().removesuffix("\r\n").encode(errors="replace") + b"\n"


def decoded(row: bytes) -> list[str]:
    """Return the cells of a row."""
    return next(csv.reader(io.StringIO(row.decode(errors="replace"), newline="")), [])


def cells_of(line: Mapping[str, Any], columns: Sequence[str]) -> list[Any]:
    """Return the cells of an output line."""
    rest = {name: value for name, value in line.items() if name not in columns}
    given = {**line, "details": rest} if rest else line
    return [_cell(name, given.get(name)) for name in columns]


def _cell(name: str, value: Any) -> Any:
    if value is None or (name in AS_JSON and not value):
        return ""
    return dumps(value).decode() if name in AS_JSON else value


def line_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row, by column, as an output line."""
    line: dict[str, Any] = {name: cell for name, cell in row.items() if cell not in ("", None)}
    for name in line.keys() & (AS_JSON | NUMBERS):
        if isinstance(line[name], str):
            with suppress(JSONDecodeError):  # another program's cell stays a text
                line[name] = loads(line[name])
    details = line.pop("details", None)
    found = line | (details if isinstance(details, dict) else {})
    return found if "error" in found else {"output": "", **found}
