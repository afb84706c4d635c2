"""What the bytes of an input are: compression, encoding and format.

>>> with Stream("questions.jsonl.GZ") as stream: stream.look().kind, stream.file.readline()

Content decides; the name counts only where the first bytes are ambiguous. Limit: a pipe cannot seek, so zip archives,
Parquet and Arrow must be files.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import stat
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import zstandard

from ragspec.errors import ConfigError
from ragspec.inputs.feed import Pipe
from ragspec.inputs.storage import bare, is_url, local_path, missing, open_binary

FEED = 1 << 10  # bytes given to a decompressor at once; 4 can become 128 KiB, so the output is at most 32 MiB
WIDEST = 1 << 27  # bytes of a frame's window; the default limit of the zstd command
MOST = 1 << 20  # decompressed bytes at once


class FrameReader(io.RawIOBase):
    """A stream over one or more compressed frames that raises if the last one is cut off or damaged.

    zstandard's stream_reader (0.25) ends silently in the middle of a frame, and Python's BZ2File and LZMAFile (3.11)
    end silently where a later stream is damaged; both would lose records. The libraries' decompressors know where a
    frame ends, but return all that their input expands to, so they get little at a time.

    Args:
        file: the compressed bytes.
        begin: makes the decompressor of one frame.
        most: bytes that the decompressor may return at once, None if it has no such limit.
        padding: bytes allowed between two frames.

    Raises:
        EOFError: the last frame is cut off; for other damage, the library's error.
    """

    def __init__(
        self, file: IO[bytes] | io.RawIOBase, begin: Callable[[], Any], *, most: int | None = None, padding: bytes = b""
    ) -> None:
        self._file = file
        self._begin = begin
        self._most = () if most is None else (most,)
        self._padding = padding
        self._frame: Any = None  # the current one
        self._ended = False  # whether a frame has ended
        self._fed = b""  # read, but not yet decompressed
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
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
    """The streams of an .xz file, with optional zero padding between them."""

    def __init__(self, file: IO[bytes] | io.RawIOBase) -> None:
        super().__init__(file, lambda: lzma.LZMADecompressor(memlimit=2 * WIDEST), most=MOST, padding=b"\0")


# -- detection -------------------------------------------------------------------------------------

PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")  # file name endings
PACKINGS = {
    "gz": (b"\x1f\x8b\x08",),
    "zst": (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16))),  # plus skippable frames
    "bz2": tuple(b"BZh%d" % level + block for level in range(1, 10) for block in (b"1AY&SY", b"\x17rE8P\x90")),
    "xz": (b"\xfd7zXZ\x00",),
    "zip": (b"PK\x03\x04", b"PK\x05\x06"),
}
TABLES = {"parquet": (b"PAR1", b"PARE"), "arrow": (b"ARROW1", b"\xff\xff\xff\xff")}  # the last: an Arrow stream
MAGICS = [magic for magics in (*PACKINGS.values(), *TABLES.values()) for magic in magics]
LONGEST_MAGIC = max(map(len, MAGICS))
LAYERS = 3  # nested compressions
HEAD = 64 << 10  # bytes that are inspected
# UTF-32 before UTF-16, whose mark is a prefix of it; readers of UTF-8 skip the UTF-8 mark themselves
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
# what decompressors and decoders raise, besides OSError
DAMAGES = (EOFError, zlib.error, zstandard.ZstdError, lzma.LZMAError, zipfile.BadZipFile, UnicodeError)


class Stream:
    """The bytes of a file, of stdin (-), of a URL or of a zip archive's `member`, decompressed and in UTF-8.

    Attributes:
        pipe: set if reads may block; nothing is read from it before `look`, which sets the attributes below.
        kind: "parquet", "arrow" or "zip", "" for text.
        packed: the compressions, outermost first.
        head: the first bytes of a text, including its first line if that fits into 64 KiB.
        whole: whether `head` is the entire text.
        file: a stream from the start.

    Raises:
        ConfigError: the input is missing, a folder, or cannot be read.
    """

    def __init__(self, path: str, options: Mapping[str, Any] | None = None, *, member: str | None = None) -> None:
        self.path = path if member is None else f"{path}/{member}"
        self.is_member = member is not None
        self.pipe: Pipe | None = None
        self.kind, self.head, self.whole = "", b"", False
        self.packed: tuple[str, ...] = ()
        self.encoding: str | None = None
        self.file: IO[bytes] | None = None
        self._options = options
        self._stack = ExitStack()
        if member is None:
            self._raw: Any = self._open()
            if _may_block(self._raw):
                self._raw = self.pipe = self._stack.enter_context(Pipe(self._raw.fileno()))
        else:
            archive = self._stack.enter_context(opened_archive(path, options))
            try:
                self._raw = self._stack.enter_context(archive.open(member))
            except (RuntimeError, NotImplementedError, *DAMAGES, OSError) as error:  # a password, for instance
                self._stack.close()
                raise ConfigError(f"{self.path}: cannot be unpacked ({error})") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _open(self) -> IO[bytes]:
        path = self.path
        if path == "-":
            if sys.stdin is None:
                raise ConfigError("-: stdin is closed; --input takes a file of records, or - for stdin")
            return sys.stdin.buffer
        if Path(path).is_dir():
            raise ConfigError(f"{path}: is a folder; --input takes a file of records, or - for stdin")
        try:
            return self._stack.enter_context(open_binary(path, self._options))
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: {missing(error)}; --input takes a file of records, or - for stdin") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None

    def check_name(self) -> None:
        """Raise ConfigError if the name promises a compression that the bytes lack. For unreadable content."""
        ending = Path(bare(self.path)).suffix.lower()
        if ending in PACKED and not self.packed:
            raise ConfigError(f"{self.path}: the compressed data is damaged (it does not begin like {ending})")

    def look(self) -> Self:
        """Detect the content and return self; waits for the first line of a pipe."""
        file = _PeekReader(self._raw)
        while (packing := _kind_by_magic(PACKINGS, file.first_bytes())) in UNPACK and len(self.packed) < LAYERS:
            file = _PeekReader(self._stack.enter_context(UNPACK[packing](file)))
            self.packed = (*self.packed, packing)
        self.kind = "zip" if packing == "zip" else _kind_by_magic(TABLES, file.seen)
        self.encoding = encoding_of(file.seen)
        if self.encoding is not None:
            file = _PeekReader(_Utf8(file, self.encoding))
        if not self.kind:
            self.whole = file.first_line(patient=self.pipe is None)
            self.head = file.seen
        self.file = io.BufferedReader(file, HEAD)
        return self


def opened_archive(path: str, options: Mapping[str, Any] | None = None) -> zipfile.ZipFile:
    """Return an open zip archive. Raises ConfigError."""
    try:
        return zipfile.ZipFile(open_binary(path, options, seeks=True) if is_url(path) else local_path(path))
    except (OSError, *DAMAGES) as error:
        raise ConfigError(f"{path}: {failure_reason(error)}") from None


def unpacked(content: bytes) -> bytes:
    """Return a file's content, decompressed if necessary. A zip archive stays packed."""
    for _ in range(LAYERS):
        unpack = UNPACK.get(_kind_by_magic(PACKINGS, content[:LONGEST_MAGIC]))
        if unpack is None:
            break
        with unpack(io.BytesIO(content)) as file:
            content = io.BufferedReader(file).read() if isinstance(file, io.RawIOBase) else file.read()
    return content


def encoding_of(first: bytes) -> str | None:
    """Return "utf-16-le" and the like from a text's first bytes, None for UTF-8 and anything else."""
    for mark, encoding in MARKS.items():
        if first.startswith(mark):
            return encoding
    # without a mark, JSON and CSV headers begin with ASCII, so every other byte is zero
    for encoding, zeros, letters in (
        ("utf-16-le", first[1:4:2], first[0:4:2]),
        ("utf-16-be", first[0:4:2], first[1:4:2]),
    ):
        if zeros == b"\0\0" and len(letters) == 2 and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in letters):
            return encoding
    return None


def decoded(content: bytes) -> str:
    """Return the text of a file in UTF-8, UTF-16 or UTF-32. Raises UnicodeError."""
    encoding = encoding_of(content[:4])
    return content.decode("utf-8-sig") if encoding is None else content.decode(encoding).removeprefix("\ufeff")


def failure_reason(error: Exception) -> str:
    """Return why bytes cannot be read, for the end of a message."""
    if isinstance(error, zstandard.ZstdError):
        most = WIDEST >> 20
        return f"the compressed data is damaged, or needs more than {most} MiB to be decompressed ({error})"
    if isinstance(error, UnicodeError):
        return f"cannot be read as text ({error}); save it as UTF-8"
    if isinstance(error, OSError) and error.errno is not None:  # gzip's own OSErrors have no number
        return f"cannot be read ({error.strerror})"
    return f"the compressed data is damaged ({error})"


UNPACK: dict[str, Callable[[Any], Any]] = {
    "gz": partial(gzip.GzipFile, None, "rb", 9),
    "zst": ZstReader,
    "bz2": Bz2Reader,
    "xz": XzReader,
}


def _may_block(file: IO[bytes]) -> bool:
    try:
        return not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except io.UnsupportedOperation:  # stdin replaced by a buffer
        return False


def _may_be_magic(found: bytes) -> bool:
    return any(magic.startswith(found) or found.startswith(magic) for magic in MAGICS)


def _kind_by_magic(magics: Mapping[str, tuple[bytes, ...]], first: bytes) -> str:
    return next((name for name, starts in magics.items() if first.startswith(starts)), "")


def is_text(head: bytes) -> bool:
    """Return whether these bytes can begin a UTF-8 text."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


class _PeekReader(io.RawIOBase):
    """A stream whose first bytes can be inspected before they are read. A read raises errors met by inspection."""

    def __init__(self, file: Any) -> None:
        self.seen = b""  # inspected, not yet read
        self._read: Callable[[int], bytes] = getattr(file, "read1", file.read)  # at most one system call
        self._error: Exception | None = None

    def readable(self) -> bool:
        return True

    def first_bytes(self) -> bytes:
        """Return enough bytes to recognise a magic number."""
        while len(self.seen) < LONGEST_MAGIC and (len(self.seen) < 4 or _may_be_magic(self.seen)):
            if b"\n" in self.seen or not self._inspect(LONGEST_MAGIC):
                break
        return self.seen

    def first_line(self, *, patient: bool) -> bool:
        """Inspect HEAD bytes, or only the first line unless `patient`; return whether that is the entire text."""
        while len(self.seen) < HEAD:
            if not patient and b"\n" in self.seen.lstrip():
                return False
            if not self._inspect(HEAD):
                return self._error is None
        return False

    def _inspect(self, most: int) -> bool:
        """Inspect up to `most` bytes in all; return whether there were more."""
        try:
            more = self._read(most - len(self.seen))
        except (OSError, *DAMAGES) as error:
            self._error = error
            return False
        self.seen += more
        return bool(more)

    def readinto(self, buffer: Any) -> int:
        data, self.seen = self.seen[: len(buffer)], self.seen[len(buffer) :]
        if not data:
            if self._error is not None:
                raise self._error
            data = self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Utf8(io.RawIOBase):
    """A UTF-16 or UTF-32 text transcoded to UTF-8 without its mark. Raises UnicodeError if the end is cut off."""

    def __init__(self, file: Any, encoding: str) -> None:
        self._file = file
        # surrogatepass: a lone surrogate is an error of its own line
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
        self._ready = b""
        self._begun = self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._ended:
            data = self._file.read(max(1, len(buffer) // 2))
            self._ended = not data
            text = self._decoder.decode(data, final=not data)
            if text and not self._begun:
                text, self._begun = text.removeprefix("\ufeff"), True
            self._ready = text.encode("utf-8", "surrogatepass")
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
