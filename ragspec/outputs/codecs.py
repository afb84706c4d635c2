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

from ragspec.outputs.ledger import Drop, Finished


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
    path = path.rstrip("/")
    if format == "parquet" or (format == "auto" and path.endswith(".parquet")):
        from ragspec.outputs.parquet import Parquet

        return Parquet()
    if path.endswith(".gz"):
        return GZIP
    return PLAIN if path.endswith((".jsonl", ".json", ".ndjson")) else ZSTD
