"""Files that are written whole or not at all, readable by their owner only.

    >>> write_whole(Path("answers.run.json"), b"{}")

What a run writes may hold users' documents, so mode 0600 is the rule. Limit: on a file system without owners, the mode
is the file system's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

MODE = 0o600


def open_private(path: Path, *, append: bool = False) -> IO[bytes]:
    """Return `path` open for writing, empty unless `append`, readable by its owner only from before the first byte."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = os.O_APPEND if append else os.O_TRUNC
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | kind, MODE)
    with suppress(OSError):  # a file system without owners
        os.fchmod(file, MODE)  # an older file may be readable by all
    return os.fdopen(file, "wb")


@contextmanager
def replacing(path: Path, draft: str = "draft") -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` when the block ends, and survives a power cut; not if it raises.

    draft: ends the file's name until then. One name lets a run write over what a killed one left; processes that may
    write the same path at once need one each.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    written = path.with_name(f".{path.name}.{draft}")
    with open_private(written) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    sync_folder(path.parent)


def is_among(path: str | Path, others: Iterable[str | Path]) -> bool:
    """Return whether a path leads to one of other files, be it through links."""
    here = Path(os.path.realpath(path))
    there = [Path(os.path.realpath(other)) for other in others]
    return here in there or (here.exists() and any(here.samefile(other) for other in there if other.exists()))


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all."""
    with replacing(path) as file:
        file.write(content)


def sync_folder(folder: Path) -> None:
    """Let the names in a folder survive a power cut, as far as its file system supports that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
