"""JSON Lines: `for row in JsonlSource("questions.jsonl.gz"): row.number, row.raw, row.value`.

A line that is not JSON becomes a value that says so, never an exception. Limit: a line has at most 256 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import jsonlines

from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import Row
from ragspec.inputs.columns import Columns
from ragspec.inputs.content import DAMAGES, failure_reason
from ragspec.inputs.text import TextSource
from ragspec.json_text import loads

LONGEST = 256 << 20  # bytes of a line
PIECE = 1 << 20  # a line is read in pieces, so that one without an end is noticed before it fills the memory


class JsonlSource(TextSource):
    """The lines of a file or of stdin that is known to be JSON Lines."""

    def __init__(self, path: str, *rest: Any, **more: Any) -> None:
        super().__init__(path, *rest, **{**more, "format": "jsonl"})


class LineReader:
    """The non-empty lines of a text; `raw` is a line without its end. path: for messages."""

    def __init__(self, file: IO[bytes], path: str, columns: Columns) -> None:
        self._file = file
        self._path = path
        self._columns = columns

    def rows(self) -> Iterator[Row]:
        number, raw = 0, b""

        def keep() -> Iterator[bytes]:
            """Hand every line to the reader and remember it, for hashing and for messages."""
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
                value = RecordError(_why(error))
            except RecordError as error:
                value = error
            yield Row(number, raw.rstrip(b"\r\n"), value)

    def _read_line(self, number: int) -> bytes:
        """Return the next line with its end, "" at the end. Raises ConfigError if it cannot be read."""
        pieces: list[bytes] = []
        room = LONGEST
        try:
            while piece := self._file.readline(PIECE):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    raise ConfigError(
                        f"{self.where(number)}: the line is longer than {LONGEST >> 20} MiB; is this JSONL, "
                        "one record per line?"
                    )
                if piece.endswith(b"\n"):
                    break
        except (OSError, *DAMAGES) as error:
            raise ConfigError(f"{self.where(number)}: {failure_reason(error)}") from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def where(self, number: int) -> str:
        """Return "path:line", as compilers do."""
        return f"{self._path}:{number}"


def _why(error: jsonlines.InvalidLineError) -> str:
    cause = error.__cause__
    if isinstance(cause, UnicodeDecodeError):
        return f"not UTF-8 (byte {cause.start + 1} is 0x{cause.object[cause.start]:02x}); save the file as UTF-8"
    return f"not valid JSON ({cause}); each line must be one JSON object"
