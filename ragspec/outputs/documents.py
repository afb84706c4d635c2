"""Small JSON files beside the lines of an output: in a file of this machine, or in a folder of any kind.

>>> LocalDocument(Path("out/answers.stats.json")).write({"records": 10})
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from ragspec.json_text import dumps, loads
from ragspec.outputs.folder import Folder
from ragspec.outputs.private import write_private


def encoded(value: Any) -> bytes:
    """Return a document's content: JSON for people to read."""
    return dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE)


def decoded(data: bytes) -> dict[str, Any]:
    """Return what a document says; nothing where it is not one."""
    try:
        value = loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` whole or not at all, for its owner's eyes, to survive a power cut. Raises OSError."""
    write_private(path, encoded(value))


class LocalDocument:
    """A file on this machine, which only its owner can read."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def read(self) -> dict[str, Any]:
        try:
            return decoded(self._path.read_bytes())
        except OSError:
            return {}

    def write(self, value: Any) -> None:
        write_json(self._path, value)


class FolderDocument:
    """A file in a folder."""

    def __init__(self, folder: Folder, name: str) -> None:
        self.name = name
        self._folder = folder

    def read(self) -> dict[str, Any]:
        try:
            return decoded(self._folder.read(self.name))
        except FileNotFoundError:
            return {}

    def write(self, value: Any) -> None:
        self._folder.put(self.name, encoded(value))
