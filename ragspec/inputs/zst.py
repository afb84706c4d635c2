"""A .zst file as a byte stream that notices a cut-off end.

zstandard's own stream_reader (0.25) ends quietly in the middle of a frame, which would silently lose records; its
decompressobj knows where a frame ends, but returns everything that its input becomes. So it is fed little at a time.
"""

from __future__ import annotations

import io
from typing import IO, Any

import zstandard

FEED = 1 << 10  # bytes; a block of 4 can become 128 KiB, so this much becomes 32 MiB at most
WIDEST = 1 << 27  # bytes that a frame may look back; what the zstd command takes without being told to take more


class ZstReader(io.RawIOBase):
    """Decompresses one or more frames. Raises EOFError if the last one is cut off, ZstdError for anything else."""

    def __init__(self, file: IO[bytes] | io.RawIOBase) -> None:
        self._file = file
        self._frame: Any = None  # the current one
        self._fed = b""  # read, but not decompressed
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Return True: this stream is for reading."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` with decompressed bytes and return how many; 0 at the end."""
        while not self._ready:
            self._fed = self._fed or self._file.read(FEED) or b""
            if not self._fed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self._decompress()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self) -> None:
        if self._frame is None:
            self._frame = zstandard.ZstdDecompressor(max_window_size=WIDEST).decompressobj()
        self._ready = memoryview(self._frame.decompress(self._fed))
        ended = self._frame.eof
        self._fed = self._frame.unused_data if ended else b""
        if ended:
            self._frame = None
