"""Lines -> the bytes of a part, and what it finishes -> back. A part's ending says how it was written.

>>> codec_of("answers.jsonl.zst").ending
'.jsonl.zst'
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import zstandard

from ragspec.errors import ConfigError
from ragspec.outputs.ledger import Drop, Finished

LINES = (".jsonl", ".ndjson")
PACKINGS = (".gz", ".zst")
# formats that a name can promise, and that are not written
OTHERS = (
    *(".json", ".csv", ".tsv", ".tab", ".xls", ".xlsx", ".ods", ".arrow", ".feather", ".ipc", ".orc", ".avro"),
    *(".bz2", ".xz", ".zip", ".7z", ".rar", ".tar", ".tgz", ".lz4", ".br", ".z", ".lzma", ".snappy"),
    *(".sqlite", ".sqlite3", ".db", ".duckdb", ".h5", ".hdf5", ".npy", ".npz", ".pkl", ".pickle", ".msgpack"),
    *(".html", ".htm", ".xml", ".yaml", ".yml", ".toml", ".md", ".pdf", ".docx"),
)
POSSIBLE = "NAME.jsonl, NAME.jsonl.gz, NAME.jsonl.zst, NAME.parquet or a folder (NAME/)"


class Codec(Protocol):
    """One way to write lines. ending: of a part's name."""

    @property
    def ending(self) -> str: ...

    def encode(self, lines: Sequence[bytes]) -> bytes:
        """Return a part's content. lines: JSON, each with its line end."""

    def finished(self, data: bytes) -> list[Finished]:
        """Return what a part's lines finish. Raises ValueError if it cannot be read."""

    def without(self, data: bytes, drop: Drop) -> bytes:
        """Return a part's content without the lines to drop."""


@dataclass(frozen=True, slots=True)
class Lines:
    """JSON Lines, packed or not."""

    ending: str
    pack: Callable[[bytes], bytes] = bytes
    unpack: Callable[[bytes], bytes] = bytes

    def encode(self, lines: Sequence[bytes]) -> bytes:
        return self.pack(b"".join(lines))

    def finished(self, data: bytes) -> list[Finished]:
        return [Finished.of(line) for line in self._lines(data)]

    def without(self, data: bytes, drop: Drop) -> bytes:
        return self.encode([line for line in self._lines(data) if not drop(Finished.of(line))])

    def _lines(self, data: bytes) -> list[bytes]:
        try:
            return self.unpack(data).splitlines(keepends=True)
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise ValueError(f"the compressed data is damaged ({error})") from None


def _gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # the same lines are the same bytes, whenever they are sent again


def _zipped(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def _unzipped(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


PLAIN, GZIP, ZSTD = (
    Lines(".jsonl"),
    Lines(".jsonl.gz", _gzipped, gzip.decompress),
    Lines(".jsonl.zst", _zipped, _unzipped),
)


def codec_of(path: str, format: str = "auto") -> Codec:
    """Return how the parts of the output `path` are written; compressed lines where its name does not say."""
    name = path.rstrip("/").lower()
    if format == "parquet" or (format == "auto" and name.endswith(".parquet")):
        from ragspec.outputs.parquet import Parquet

        return Parquet()
    if name.endswith(".gz"):
        return GZIP
    return PLAIN if name.endswith((*LINES, ".json")) else ZSTD


def check_ending(path: str, format: str = "auto") -> None:
    """Raise ConfigError for an output whose name promises a format that it would not have.

    format: that the config asks for. JSON Lines may be called .json where it asks for them.
    """
    name = path.rstrip("/").lower()
    lines = format in ("jsonl", "openai")
    inner = name.removesuffix(".gz").removesuffix(".zst")
    if format == "parquet" and name.endswith((*LINES, *PACKINGS)):
        raise ConfigError(f"output.format: parquet, but {path} ends in .{name.rpartition('.')[2]}")
    ending = next((ending for ending in OTHERS if inner.endswith(ending)), "")
    if ending == ".json" and lines:
        return
    if inner != name and inner.endswith(".parquet"):
        ending = name.removeprefix(inner.removesuffix(".parquet"))
    if ending:
        so = "; for JSON Lines under that name, set output.format: jsonl" if ending == ".json" else ""
        raise ConfigError(f"{path}: {ending} is not written; possible are {POSSIBLE}{so}")
