"""Compressed files as byte streams that notice a cut-off or damaged end: .zst, .bz2 and .xz.

zstandard's own stream_reader (0.25) ends quietly in the middle of a frame, and Python's BZ2File and LZMAFile (3.11) end
quietly where a further stream is damaged; both would silently lose records. The libraries' decompressors know where a
frame ends, but return everything that their input becomes. So they are fed little at a time.
"""

from __future__ import annotations

import bz2
import io
import lzma
from collections.abc import Callable
from typing import IO, Any

import zstandard

FEED = 1 << 10  # bytes; a block of 4 can become 128 KiB, so this much becomes 32 MiB at most
WIDEST = 1 << 27  # bytes that a frame may look back; what the zstd command takes without being told to take more
MOST = 1 << 20  # bytes at once


class FrameReader(io.RawIOBase):
    """Decompresses one or more frames. Raises EOFError if the last one is cut off, the library's error for others.

    begin: makes what decompresses a frame. most: bytes that it may return at once, if it can be told. padding: bytes
    that may stand between two.
    """

    def __init__(
        self, file: IO[bytes] | io.RawIOBase, begin: Callable[[], Any], *, most: int | None = None, padding: bytes = b""
    ) -> None:
        self._file = file
        self._begin = begin
        self._most = () if most is None else (most,)
        self._padding = padding
        self._frame: Any = None  # the current one
        self._ended = False  # whether one has ended
        self._fed = b""  # read, but not decompressed
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Return True: this stream is for reading."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` with decompressed bytes and return how many; 0 at the end."""
        while not self._ready:
            if getattr(self._frame, "needs_input", True):
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
            if self._ended and self._padding:
                self._fed = self._fed.lstrip(self._padding)
            if not self._fed:
                return
            self._frame = self._begin()
        self._ready = memoryview(self._frame.decompress(self._fed, *self._most))
        self._ended = self._frame.eof
        self._fed = self._frame.unused_data if self._ended else b""
        if self._ended:
            self._frame = None


class ZstReader(FrameReader):
    """The frames of a .zst file."""

    def __init__(self, file: IO[bytes] | io.RawIOBase) -> None:
        super().__init__(file, lambda: zstandard.ZstdDecompressor(max_window_size=WIDEST).decompressobj())


class Bz2Reader(FrameReader):
    """The streams of a .bz2 file."""

    def __init__(self, file: IO[bytes] | io.RawIOBase) -> None:
        super().__init__(file, bz2.BZ2Decompressor, most=MOST)


class XzReader(FrameReader):
    """The streams of an .xz file, which zeros may stand between."""

    def __init__(self, file: IO[bytes] | io.RawIOBase) -> None:
        super().__init__(file, lambda: lzma.LZMADecompressor(memlimit=2 * WIDEST), most=MOST, padding=b"\0")
