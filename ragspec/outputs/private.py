"""Files that only their owner can read: everything written about a run, since a config may contain private values."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from ragspec.outputs.linefile import sync_folder

MODE = 0o600


def open_private(path: Path, *, append: bool = False) -> IO[bytes]:
    """Return `path` open for writing, empty unless `append`, readable by its owner only from before the first byte."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = os.O_APPEND if append else os.O_TRUNC
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | kind, MODE)
    with suppress(OSError):  # a file system without owners
        os.fchmod(file, MODE)  # an older file may be readable by all
    return os.fdopen(file, "wb")


def write_private(path: Path, content: bytes) -> None:
    """Write `content` to `path` whole or not at all, so that it survives a power cut, readable by its owner only."""
    path = Path(os.path.realpath(path))  # a link stays one
    draft = path.with_name(f".{path.name}.draft")  # one name: what a killed run leaves is written over
    with open_private(draft) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)
