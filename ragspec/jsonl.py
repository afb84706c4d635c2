"""Lines in: `for line in open_lines("questions.jsonl.gz"): line.number, line.raw, line.value`.

Plain, .gz and .zst files and stdin; a line that is no JSON comes as a value that says so, never as an exception.
Limit: a line must fit in memory.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

import jsonlines
import orjson
import zstandard

from ragspec.errors import ConfigError, RecordError
from ragspec.zst import ZstReader


@dataclass(frozen=True, slots=True)
class Line:
    """One non-empty line: its 1-based number, its bytes without the line end, and its JSON value or the error."""

    number: int
    raw: bytes
    value: Any


class Lines:
    """The lines of one input, opened at once (so that a missing file is known at once) and read lazily."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._stack = ExitStack()
        self._file = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _open(self) -> IO[bytes]:
        if self.path == "-":
            return sys.stdin.buffer
        path = Path(self.path)
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; --input takes a JSONL file or - for stdin")
        try:
            file = self._stack.enter_context(path.open("rb"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; --input takes a JSONL file or - for stdin") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        if path.suffix == ".gz":
            return cast(IO[bytes], self._stack.enter_context(gzip.open(file, "rb")))
        if path.suffix == ".zst":
            return io.BufferedReader(ZstReader(file))
        return file

    def __iter__(self) -> Iterator[Line]:
        number, raw = 0, b""

        def keep() -> Iterator[bytes]:
            """Hand every line to the reader and remember it, for hashing and for messages."""
            nonlocal number, raw
            try:
                for number, raw in enumerate(self._file, 1):  # noqa: B007 (read by the enclosing function)
                    yield raw
            except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
                raise ConfigError(f"{self.path}:{number + 1}: the compressed data is damaged ({error})") from None

        reader = jsonlines.Reader(keep(), loads=orjson.loads)
        while True:
            value: Any
            try:
                value = reader.read(allow_none=True, skip_empty=True)
            except EOFError:
                return
            except jsonlines.InvalidLineError as error:
                value = RecordError(f"{self.path}:{number}: {_why(error)}")
            yield Line(number, raw.rstrip(b"\r\n"), value)

    def count(self) -> int | None:
        """Return how many lines a plain file has, for a progress bar; None for pipes and compressed files."""
        path = Path(self.path)
        if self.path == "-" or path.suffix in (".gz", ".zst") or not path.is_file():
            return None
        with path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _why(error: jsonlines.InvalidLineError) -> str:
    cause = error.__cause__
    if isinstance(cause, UnicodeDecodeError):
        return f"not UTF-8 (byte {cause.start + 1} is 0x{cause.object[cause.start]:02x}); save the file as UTF-8"
    return f"not valid JSON ({cause}); one JSON object a line is expected"
