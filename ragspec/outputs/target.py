"""From a config's output to a target: a file that is appended to, a folder of parts, or a stream.

>>> target_of(OutputConfig(path="s3://bucket/answers/")).name
's3://bucket/answers/'
"""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ragspec.config.io import OutputConfig
from ragspec.config.redaction import revealed
from ragspec.errors import ConfigError
from ragspec.host.cache import cache_dir
from ragspec.inputs.storage import is_url, local_path
from ragspec.outputs import parts, table
from ragspec.outputs.base import Document, Store
from ragspec.outputs.codecs import CSV, LANCE, Codec, check_ending, codec_of
from ragspec.outputs.csv_file import CsvFile
from ragspec.outputs.folder import Folder, FolderDocument, LocalDocument, LocalFolder, RemoteFolder
from ragspec.outputs.line_file import Appended, write_all
from ragspec.outputs.parts import Parts
from ragspec.outputs.run_state import PENDING, STATE, STATISTICS, UPDATES, FileState, RunState, sibling


class OutStream:
    """`output` (- for stdout), a stream that keeps nothing, written line by line. Raises OSError."""

    def __init__(self, output: str) -> None:
        self._own = output != "-"
        self._file: Any = open(output, "wb", buffering=0) if self._own else _stdout()  # noqa: SIM115 (see close)

    def append(self, line: bytes) -> None:
        """Write a line."""
        write_all(self._file, line)

    def sync(self) -> None:
        """Do nothing: a stream keeps nothing."""

    def close(self) -> None:
        """Close the stream, unless it is stdout."""
        if self._own:
            self._file.close()


def _stdout() -> Any:
    """Return stdout unbuffered: data that a vanished reader did not take must not be written again at exit."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, "stdout is closed")
    sys.stdout.flush()
    return getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)


PACKED = (".gz", ".zst", ".parquet")


class Target(Protocol):
    """An output that can be resumed.

    Attributes:
        name: for messages.
        address: the path or URL with secrets in clear text.
        is_folder: whether it is a folder of parts.
        pending: the file of lines ahead of their turn.
        updates: the file of new lines while an update runs.
        state: run.json.
        statistics: stats.json.
    """

    name: str
    address: str
    is_folder: bool
    pending: Path
    updates: Path
    state: RunState
    statistics: Document

    def open(self) -> Store:
        """Return the store, locked. Raises OSError."""

    def begun(self) -> bool:
        """Return whether there are lines of an earlier run."""

    def whereabouts(self) -> list[str]:
        """Return the places of finished lines, for a message."""

    def files(self) -> dict[str, Path]:
        """Return the local files that a run writes, by purpose."""


@contextmanager
def opening_errors(output: str) -> Iterator[None]:
    """Convert an error of opening an output to a one-line ConfigError."""
    try:
        yield
    except BlockingIOError:
        raise ConfigError(f"{output}: another run is writing it; wait for it, or choose another --output") from None
    except OSError as error:
        where = error.filename or output
        raise ConfigError(f"{where}: cannot be written ({error.strerror}); choose another --output") from None


def target_of(config: OutputConfig) -> Target | None:
    """Return the target of an output; None for stdout, pipes and devices, which keep nothing. Raises ConfigError."""
    path = local_path(revealed(config.path))
    there, is_remote = Path(path), is_url(path)
    if config.format == "csv" and (is_remote or path == "-" or (there.exists() and not there.is_file())):
        raise ConfigError(f"output.format: csv needs a local file, and {config.path} is not one")
    if path == "-" or path.startswith("/dev/"):
        return None
    if not is_remote and there.exists() and not there.is_file() and not there.is_dir():
        return None
    if path.rstrip("/").lower().endswith(LANCE):
        if is_remote or config.format != "auto":
            why = "is written on this machine only" if is_remote else f"has no output.format: {config.format}"
            raise ConfigError(f"{config.path}: a Lance table {why}; choose another --output")
        return TableTarget(path.rstrip("/"))
    if config.format in ("jsonl", "openai") and path.rstrip("/").lower().endswith(".parquet"):
        raise ConfigError(f"output.format: {config.format}, but {config.path} ends in .parquet")
    whole = path.lower().endswith((*PACKED, "/")) or config.format == "parquet"
    if is_remote or whole or there.is_dir():
        return PartsTarget(config)
    if config.format == "csv" or (config.format == "auto" and path.lower().endswith(CSV)):
        return CsvTarget(path, config.include)
    return FileTarget(path)


def check_name(config: OutputConfig) -> None:
    """Raise ConfigError for an output whose name promises a format that it would not have.

    An output begun by an older version under such a name may be resumed.
    """
    path = local_path(revealed(config.path))
    begun = not is_url(path) and Path(path).is_file() and sibling(path, STATE).exists()
    if not begun and target_of(config) is not None:
        check_ending(str(config.path), config.format)


class FileTarget:
    """A local file of lines, with its other files beside it."""

    is_folder = False

    def __init__(self, path: str) -> None:
        self.name = self.address = path
        self.path = Path(path)
        self.pending = sibling(path, PENDING)
        self.updates = sibling(path, UPDATES)
        self.state: RunState = FileState(path)
        self.statistics: Document = LocalDocument(sibling(path, STATISTICS))

    def open(self) -> Store:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return Appended(self.path)

    def begun(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size > 0

    def whereabouts(self) -> list[str]:
        names = {
            self.path: self.name,
            self.pending: f"{self.pending} (answers waiting for earlier ones)",
            self.updates: f"{self.updates} (an update's answers)",
        }
        return [name for path, name in names.items() if path.exists() and path.stat().st_size]

    def files(self) -> dict[str, Path]:
        return {
            "output": self.path,
            "the run's state": sibling(self.name, STATE),
            "the file of waiting answers": self.pending,
            "the file of an update's answers": self.updates,
            "the statistics": sibling(self.name, STATISTICS),
        }


class CsvTarget(FileTarget):
    """A local CSV file, with its other files beside it. include: `output.include`."""

    def __init__(self, path: str, include: Sequence[str]) -> None:
        super().__init__(path)
        self._include = include

    def open(self) -> Store:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return CsvFile(self.path, self._include)


class TableTarget(FileTarget):
    """A local Lance table, with its other files beside it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._spool = self.path.with_name(self.path.name + table.SPOOL)

    def open(self) -> Store:
        if self.path.exists() and not self.state.is_ours():
            raise ConfigError(
                f"{self.name}: already exists, but has no {sibling(self.name, STATE).name} written by ragspec; "
                "choose another --output"
            )
        self.path.absolute().parent.mkdir(parents=True, exist_ok=True)
        return table.LanceTable(self.path)

    def begun(self) -> bool:
        return self.path.exists() or self._spool.exists()

    def whereabouts(self) -> list[str]:
        names = {self._spool: "not yet in the table", self.pending: "answers waiting for earlier ones"}
        names[self.updates] = "an update's answers"
        kept = [f"{path} ({what})" for path, what in names.items() if path.exists() and path.stat().st_size]
        return [self.name, *kept] if (self.path / "_versions").is_dir() else kept

    def files(self) -> dict[str, Path]:
        return {**super().files(), "the file of unfinished answers": self._spool}


def _endpoint(options: Mapping[str, Any]) -> list[Any]:
    """Return what identifies the object store of a URL."""
    client = options.get("client_kwargs") or {}
    named = [options.get("endpoint_url"), client.get("endpoint_url") if isinstance(client, dict) else None]
    return [*named, *(os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))]


class PartsTarget:
    """A folder of parts, local or remote. Unsealed lines are in it, or in the user's cache folder if it is remote."""

    is_folder = True

    def __init__(self, config: OutputConfig) -> None:
        self.name = str(config.path)
        self.address = path = local_path(revealed(config.path))
        self._records, self._size = config.part_records, config.part_mib << 20
        self._codec: Codec = codec_of(path, config.format)
        self._folder: Folder
        self._own: dict[str, Path] = {}
        if is_url(path):
            options = revealed(config.storage_options)
            self._folder = RemoteFolder(path, options)
            # a URL means another place at another endpoint; the hashed text contains no password
            key = "\0".join([self.name.rstrip("/"), *map(str, _endpoint(options))])
            self._local = cache_dir() / "spool" / hashlib.sha256(key.encode()).hexdigest()[:16]
            state: Document = FolderDocument(self._folder, parts.STATE)
            self.statistics: Document = FolderDocument(self._folder, parts.STATISTICS)
        else:
            here = Path(os.path.realpath(path))
            self._folder = LocalFolder(here)
            self._local = here / "_unsealed"
            self._own = {"output": here}
            state = LocalDocument(here / parts.STATE)
            self.statistics = LocalDocument(here / parts.STATISTICS)
        self.pending = self._local / parts.WAITING
        self.updates = self._local / parts.UPDATES
        self.state = RunState(self.name, state)

    def open(self) -> Parts:
        if any(path.is_file() for path in self._own.values()):
            raise ConfigError(
                f"{self.name}: is a file, and this run would write a folder of parts; remove the file, or choose "
                "another --output"
            )
        names = set(self._folder.names())
        if parts.OLDER_STATE in names and parts.STATE not in names and any(map(parts.NAME.fullmatch, names)):
            raise ConfigError(
                f"{self.name}: its {parts.OLDER_STATE} is of ragspec 0.2 or before; rename it to {parts.STATE} to "
                "continue, or choose another --output"
            )
        if not self.begun() and (other := self._others()):
            raise ConfigError(
                f"{self.name}: already has {other}, but no {parts.STATE} written by ragspec; choose another --output"
            )
        return Parts(self._folder, self._codec, self._local, records=self._records, size=self._size)

    def begun(self) -> bool:
        return self.state.is_ours()

    def _others(self) -> str:
        """Return a file that a run would overwrite and that is not ragspec's, "" without one."""
        return next(iter({parts.STATE, parts.STATISTICS, parts.MANIFEST} & set(self._folder.names())), "")

    def whereabouts(self) -> list[str]:
        spool = self._local / parts.SPOOL
        kept = [self.name] if any(parts.NAME.fullmatch(name) for name in self._folder.names()) else []
        if spool.exists() and spool.stat().st_size:
            kept.append(f"{spool} (not yet in a part)")
        return kept

    def files(self) -> dict[str, Path]:
        return self._own
