"""A .zst file as a byte stream that notices a cut-off end.

zstandard's own stream_reader (0.25) ends quietly in the middle of a frame, which would lose records without a word.
"""

from __future__ import annotations

import io
from typing import IO

import zstandard

CHUNK = 1 << 17


class ZstReader(io.RawIOBase):
    """Decompresses one or more frames. Raises EOFError where the last one is not whole."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False  # whether the current frame has had any byte
        self._ready = b""

    def readable(self) -> bool:
        """Return True: this stream is for reading."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` with decompressed bytes and return how many; 0 at the end."""
        while not self._ready:
            chunk = self._frame.unused_data if self._frame.eof else self._file.read(CHUNK)
            if self._frame.eof:
                self._frame, self._begun = zstandard.ZstdDecompressor().decompressobj(), False
                chunk = chunk or self._file.read(CHUNK)
            if not chunk:
                if self._begun:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self._begun = True
            self._ready = self._frame.decompress(chunk)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
