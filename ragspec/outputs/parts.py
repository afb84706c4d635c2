"""An output as a folder of parts, for formats and stores without append (compressed files, Parquet, object stores).

    answers.jsonl.zst/part-00000.jsonl.zst, part-00001.jsonl.zst, ..., _run.json, _stats.json, _manifest.json

A line is finished once it is in the spool, a local file. A full spool is sealed: written as the next part and emptied.
A run killed in between leaves lines in both, and the next one drops them from the spool. Losing the machine loses the
spool: at most one part's lines are answered again.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ragspec.errors import ConfigError
from ragspec.inputs.record_ids import KeySet
from ragspec.outputs.base import Change
from ragspec.outputs.codecs import Codec
from ragspec.outputs.folder import Folder, encoded
from ragspec.outputs.ledger import Drop, Finished
from ragspec.outputs.line_file import LineFile, Spill

NAME = re.compile(r"part-(\d+)(\..+)")
# Arrow, pandas and Spark skip names like these when they read a folder as one data set
MANIFEST, STATE, STATISTICS = "_manifest.json", "_run.json", "_stats.json"
OLDER_STATE = "run.json"  # of versions before 0.3
SPOOL, WAITING, UPDATES = "lines.jsonl", "pending.jsonl", "update.jsonl"  # in the local folder of unsealed lines


@dataclass(frozen=True, slots=True)
class Part:
    """A part's entry in the manifest. records: lines, including failed records. bytes: the file's size."""

    name: str
    records: int
    failed: int
    bytes: int
    sha256: str


class Parts:
    """Parts in `folder`, with unsealed lines in `local`. records, size: maximum lines and uncompressed bytes."""

    def __init__(self, folder: Folder, codec: Codec, local: Path, *, records: int, size: int) -> None:
        self._folder = folder
        self._codec = codec
        self._local = local
        self._records = records
        self._size = size
        local.mkdir(parents=True, exist_ok=True)
        self._spool = LineFile(local / SPOOL)
        try:
            self._names = self._found()
        except BaseException:
            self._spool.close()
            raise
        self._parts: dict[str, Part] = {}
        self._waiting = 0  # lines in the spool; `finished` counts those of an earlier run
        self._complete = True  # whether an existing manifest is still valid

    def _found(self) -> list[str]:
        """Return the existing parts. Raises OSError for parts of another format."""
        found = [(name, match) for name in self._folder.names() if (match := NAME.fullmatch(name))]
        for name, match in found:
            if match[2] != self._codec.ending:
                raise OSError(
                    errno.EEXIST, f"it has {name}, and this run would write parts that end in {self._codec.ending}"
                )
        return sorted((name for name, _ in found), key=_number)

    @property
    def begun(self) -> bool:
        """Return whether there are lines."""
        return bool(self._names or self._spool.size)

    def finished(self, drop: Drop | None = None) -> Iterator[Finished]:
        """Yield the finished rows of the parts, then of the spool, from which lines already in a part are removed."""
        sealed = KeySet()
        for name in list(self._names):
            for found in self._read(name, drop):
                if found.key is not None:
                    sealed.add(found.key)
                yield found
        self._spool.cut_torn_line()
        kept = self._spool.keep_only(lambda found: found.key not in sealed and not (drop and drop(found)))
        self._waiting = len(kept)
        yield from kept

    def _read(self, name: str, drop: Drop | None) -> list[Finished]:
        data = self._folder.read(name)
        try:
            found = self._codec.finished(data)
            if drop is not None and any(map(drop, found)):
                self._change()
                data = self._codec.without(data, drop)
                found = [each for each in found if not drop(each)]
                if not found:
                    self._folder.delete(name)
                    self._names.remove(name)
                    return []
                self._folder.put(name, data)
        except ValueError as error:
            raise ConfigError(
                f"{name}: a part of the output: {error}; delete that part, whose records are then answered again, or "
                "choose another --output"
            ) from None
        self._parts[name] = _part(name, found, data)
        return found

    def rewrite(self, change: Change, more: Iterable[bytes]) -> None:
        """Rewrite the parts whose lines change, one after the other, then the spool; append `more`."""
        for name in list(self._names):
            try:
                lines = self._codec.lines(self._folder.read(name))
            except ValueError as error:
                raise OSError(errno.EIO, str(error), name) from None
            changed = [new for line in lines if (new := change(line)) is not None]
            if changed == lines:
                continue
            self._change()
            if changed:
                data = self._codec.encode(changed)
                self._folder.put(name, data)
                self._parts[name] = _part(name, [Finished.of(line) for line in changed], data)
            else:
                self._folder.delete(name)
                self._names.remove(name)
                del self._parts[name]
        unsealed = [new for _, line in self._spool if (new := change(line)) is not None]
        self._spool.replace(unsealed)
        self._waiting = len(unsealed)
        for line in more:
            self.append(line)

    def append(self, line: bytes) -> None:
        """Write a line to the spool, and seal a part if the spool is full."""
        self._spool.append(line)
        self._waiting += 1
        if self._waiting >= self._records or self._spool.size >= self._size:
            self._seal()

    def _seal(self) -> None:
        """Write the spool as the next part and empty it."""
        lines = [line for _, line in self._spool]
        name = f"part-{_number(self._names[-1]) + 1 if self._names else 0:05}{self._codec.ending}"
        data = self._codec.encode(lines)
        self._change()
        self._folder.create(name, data)
        self._parts[name] = _part(name, [Finished.of(line) for line in lines], data)
        self._names.append(name)
        self._spool.empty()
        self._waiting = 0

    def _change(self) -> None:
        """Delete a manifest that is about to become invalid."""
        if self._complete:
            self._folder.delete(MANIFEST)
            self._complete = False

    def set_aside(self, spill: Spill | None) -> None:
        """Move everything to FOLDER.1, FOLDER.2, ..., with waiting lines in a last part."""
        self._spool.cut_torn_line()
        if spill:
            for _, line in spill.lines():
                self._spool.append(line)
            spill.remove()
        if self._spool.size:
            self._seal()
        self._folder.set_aside([*self._names, *(set(self._folder.names()) & {STATE, STATISTICS, MANIFEST})])
        self._names, self._parts = [], {}

    def finish(self) -> None:
        """Seal the last part and write the manifest."""
        if self._waiting:
            self._seal()
        parts = [self._parts[name] for name in self._names]
        self._folder.put(
            MANIFEST,
            encoded(
                {
                    "records": sum(part.records for part in parts),
                    "failed": sum(part.failed for part in parts),
                    "parts": [asdict(part) for part in parts],
                }
            ),
        )

    def sync(self) -> None:
        """Make the spool survive a power failure; parts already do."""
        self._spool.sync()

    def close(self) -> None:
        """Close the spool, and delete it if empty."""
        if self._spool.size:
            self._spool.close()
            return
        self._spool.remove()
        with suppress(OSError):  # the folder has other files
            self._local.rmdir()


def _number(name: str) -> int:
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


def _part(name: str, found: list[Finished], data: bytes) -> Part:
    failed = sum(each.failed for each in found)
    return Part(name, len(found), failed, len(data), hashlib.sha256(data).hexdigest())
