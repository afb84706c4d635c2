"""JSON Lines: `for row in JsonlSource("questions.jsonl.gz"): row.number, row.raw, row.value`.

Plain, .gz and .zst files and stdin; a line that is not JSON becomes a value that says so, never an exception. Input
that keeps its reader waiting (a pipe, a terminal) is read on a thread: see live.py. Limit: a line has at most 256 MiB.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self, cast

import jsonlines
import orjson
import zstandard

from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import Row
from ragspec.inputs.columns import ALL, Columns
from ragspec.inputs.live import Live, Pipe
from ragspec.inputs.storage import bare, is_url, missing, open_binary
from ragspec.inputs.zst import WIDEST, ZstReader

LONGEST = 256 << 20  # bytes of a line
PIECE = 1 << 20  # a line is read in pieces, so that one without an end is noticed before it fills the memory


class JsonlSource:
    """The non-empty lines of a file or of stdin; `raw` is a line without its end."""

    def __init__(self, path: str, columns: Columns = ALL, options: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._columns = columns
        self._options = options
        self._stack = ExitStack()
        self._pipe: Pipe | None = None  # if the input may keep its reader waiting
        self._file = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _open(self) -> IO[bytes]:
        file: Any = self._open_as_it_is()
        if self._waits(file):
            file = self._pipe = self._stack.enter_context(Pipe(file.fileno()))
        if self._packed(".gz"):
            return cast(IO[bytes], self._stack.enter_context(gzip.open(file, "rb")))
        if self._packed(".zst"):
            return io.BufferedReader(ZstReader(file), zstandard.DECOMPRESSION_RECOMMENDED_OUTPUT_SIZE)
        return io.BufferedReader(self._pipe) if self._pipe else cast(IO[bytes], file)

    def _packed(self, ending: str) -> bool:
        return bare(self.path).endswith(ending)

    def _open_as_it_is(self) -> IO[bytes]:
        if self.path == "-":
            if sys.stdin is None:
                raise ConfigError("-: stdin is closed; --input takes a file of records, or - for stdin")
            return sys.stdin.buffer
        path = self.path
        if Path(path).is_dir():
            raise ConfigError(f"{path}: is a folder; --input takes a file of records, or - for stdin")
        try:
            return self._stack.enter_context(open_binary(path, self._options))
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: {missing(error)}; --input takes a file of records, or - for stdin") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None

    @staticmethod
    def _waits(file: IO[bytes]) -> bool:
        try:
            return not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        except io.UnsupportedOperation:  # a stand-in for stdin, in memory
            return False

    def __iter__(self) -> Iterator[Row]:
        if self._pipe is None:
            return self._read()
        live = Live(self._read(), self._pipe, size=lambda row: len(row.raw))
        self._stack.callback(live.close)
        return live

    def _read(self) -> Iterator[Row]:
        number, raw = 0, b""

        def keep() -> Iterator[bytes]:
            """Hand every line to the reader and remember it, for hashing and for messages."""
            nonlocal number, raw
            while raw := self._read_line(number + 1):
                number += 1
                yield raw

        reader = jsonlines.Reader(keep(), loads=orjson.loads)
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
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise ConfigError(f"{self.where(number)}: {_what_failed(error)}") from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def count(self) -> int | None:
        """Return how many lines a plain file has, for a progress bar; None for pipes and compressed files."""
        path = Path(self.path)
        if self.path == "-" or is_url(self.path) or path.suffix in (".gz", ".zst") or not path.is_file():
            return None
        with path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))

    def where(self, number: int) -> str:
        """Return "path:line", as compilers do."""
        return f"{self.path}:{number}"


def _why(error: jsonlines.InvalidLineError) -> str:
    cause = error.__cause__
    if isinstance(cause, UnicodeDecodeError):
        return f"not UTF-8 (byte {cause.start + 1} is 0x{cause.object[cause.start]:02x}); save the file as UTF-8"
    return f"not valid JSON ({cause}); each line must be one JSON object"


def _what_failed(error: Exception) -> str:
    if isinstance(error, zstandard.ZstdError):
        most = WIDEST >> 20
        return f"the compressed data is damaged, or needs more than {most} MiB to be decompressed ({error})"
    if isinstance(error, OSError) and error.errno is not None:  # gzip raises OSErrors of its own, without a number
        return f"cannot be read ({error.strerror})"
    return f"the compressed data is damaged ({error})"
