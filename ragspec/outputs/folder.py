"""Files and folders of an output: private files, folders here and on object stores, small JSON documents.

>>> folder = LocalFolder(Path("answers.parquet")); folder.create("part-00000.parquet", b"...")

Files about a run are readable only by their owner (mode 0600), since a config may contain private values.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import orjson

from ragspec.host.files import sync_folder, write_whole
from ragspec.inputs.storage import address_errors, filesystem
from ragspec.json_text import dumps, loads
from ragspec.outputs.line_file import free_number

# -- folders ---------------------------------------------------------------------------------------

OBJECTS = {"s3", "s3a", "gs", "gcs"}  # stores that can create a file exclusively
TAKEN = "already exists with different answers: another run is writing this output"


class Folder(Protocol):
    """Files by name. Every method raises OSError."""

    def names(self) -> list[str]:
        """Return the names of the files, none if the folder does not exist."""

    def read(self, name: str) -> bytes:
        """Return a file's content."""

    def create(self, name: str, data: bytes) -> None:
        """Write a new file atomically. Raises FileExistsError if the name exists with other content."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file atomically, replacing one of the same name."""

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""

    def set_aside(self, names: list[str]) -> None:
        """Move files to the first free one of FOLDER.1, FOLDER.2, ..."""


class LocalFolder:
    """A folder on this machine, locked by its writer (parts.py)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        return sorted(each.name for each in self.path.iterdir() if each.is_file()) if self.path.is_dir() else []

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def create(self, name: str, data: bytes) -> None:
        if (self.path / name).exists():
            raise FileExistsError(errno.EEXIST, TAKEN, str(self.path / name))
        self.put(name, data)

    def put(self, name: str, data: bytes) -> None:
        draft = self.path / f".{name}.draft"
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path / name)
        sync_folder(self.path)

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def set_aside(self, names: list[str]) -> None:
        other = self.path.with_name(f"{self.path.name}.{free_number(self.path)}")
        other.mkdir()
        for name in names:
            shutil.move(self.path / name, other / name)
        sync_folder(other)


class RemoteFolder:
    """A prefix of an object store, or a folder of any file system that fsspec supports."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url = url.rstrip("/")
        self._system, self._path = filesystem(self.url, options)
        self._exclusive = self.url.partition("://")[0].lower() in OBJECTS

    def names(self) -> list[str]:
        return self._listed(self._path)

    def _listed(self, path: str) -> list[str]:
        with address_errors(self.url):
            self._system.invalidate_cache()
            try:
                found = self._system.ls(path, detail=False)
            except FileNotFoundError:
                return []
        return sorted(name.rpartition("/")[2] for name in found if name.rstrip("/") != path.rstrip("/"))

    def read(self, name: str) -> bytes:
        with address_errors(f"{self.url}/{name}"):
            return bytes(self._system.cat_file(f"{self._path}/{name}"))

    def create(self, name: str, data: bytes) -> None:
        url = f"{self.url}/{name}"
        with address_errors(url):
            try:
                if self._exclusive:
                    self._system.pipe_file(f"{self._path}/{name}", data, mode="create")
                elif self._system.exists(f"{self._path}/{name}"):
                    raise FileExistsError
                else:
                    self.put(name, data)
            except FileExistsError:
                # equal content: our own write was retried after the connection broke
                if self.read(name) != data:
                    raise FileExistsError(errno.EEXIST, TAKEN, url) from None

    def put(self, name: str, data: bytes) -> None:
        path = f"{self._path}/{name}"
        with address_errors(f"{self.url}/{name}"):
            if self._exclusive:  # objects appear atomically
                self._system.pipe_file(path, data)
                return
            self._system.makedirs(self._path, exist_ok=True)
            draft = f"{self._path}/.{name}.draft"
            self._system.pipe_file(draft, data)
            if self._system.exists(path):
                self._system.rm_file(path)
            self._system.mv(draft, path)

    def delete(self, name: str) -> None:
        with address_errors(f"{self.url}/{name}"):
            if self._system.exists(f"{self._path}/{name}"):
                self._system.rm_file(f"{self._path}/{name}")

    def set_aside(self, names: list[str]) -> None:
        other = next(f"{self._path}.{n}" for n in count(1) if not self._listed(f"{self._path}.{n}"))
        with address_errors(self.url):
            for name in names:
                self._system.cp_file(f"{self._path}/{name}", f"{other}/{name}")
            for name in names:
                self._system.rm_file(f"{self._path}/{name}")


# -- documents -------------------------------------------------------------------------------------


def encoded(value: Any) -> bytes:
    """Return a document as indented JSON."""
    return dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE)


def decoded(data: bytes) -> dict[str, Any]:
    """Return a document's content, {} if it is invalid."""
    try:
        value = loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as JSON, atomically and durably, readable only by its owner. Raises OSError."""
    write_whole(path, encoded(value))


class LocalDocument:
    """A JSON file on this machine, readable only by its owner.

    >>> LocalDocument(Path("out/answers.stats.json")).write({"records": 10})
    """

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
    """A JSON file in a folder."""

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
