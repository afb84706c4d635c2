"""JSON Lines: `for row in JsonlSource("questions.jsonl.gz"): row.number, row.raw, row.value`.

A line that is not JSON, or has more than 256 MiB, becomes a value that says so, never an exception. Limit: a line of
4 GiB ends the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import IO, Any

import jsonlines

from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import Row
from ragspec.inputs.columns import Columns
from ragspec.inputs.content import DAMAGES, failure_reason
from ragspec.inputs.text import TextSource
from ragspec.json_text import loads

LONGEST = 256 << 20  # bytes of a line
ENDLESS = 16 * LONGEST  # of what is no line any more
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
        self._too_long = 0  # bytes of the line that was read last, if it has too many

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
                value = RecordError(self._why(error))
            except RecordError as error:
                value = error
            yield Row(number, raw.rstrip(b"\r\n"), value)

    def _read_line(self, number: int) -> bytes:
        """Return the next line with its end, "" at the end; of one that is too long, a digest, which is no JSON.

        Raises ConfigError if it cannot be read.
        """
        pieces: list[bytes] = []
        size, found, self._too_long = 0, blake2b(digest_size=16), 0
        try:
            while piece := self._file.readline(PIECE):
                size += len(piece)
                pieces.append(piece)
                if size > LONGEST:  # what identifies it is kept, and no more
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

    def _why(self, error: jsonlines.InvalidLineError) -> str:
        """Return why the line that was read last is none."""
        if self._too_long:
            return f"the line has {self._too_long >> 20:,} MiB, {LONGEST >> 20} at most; one record per line"
        cause = error.__cause__
        if isinstance(cause, UnicodeDecodeError):
            return f"not UTF-8 (byte {cause.start + 1} is 0x{cause.object[cause.start]:02x}); save the file as UTF-8"
        return f"not valid JSON ({cause}); each line must be one JSON object"

    def where(self, number: int) -> str:
        """Return "path:line", as compilers do."""
        return f"{self._path}:{number}"
