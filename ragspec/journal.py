"""The output file: appended line by line, flushed as records finish, resumed where it ended.

Beside `answers.jsonl` stands `answers.run.json`, which names the config that began it. A line holds the fingerprint of
the input line that it answers, so a resumed run knows what is finished whatever order the lines have.
Limit: one process at a time may write an output (a lock sees to that).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Any, Self

import orjson

from ragspec.errors import ConfigError
from ragspec.jsonl import Line
from ragspec.keyset import KeySet
from ragspec.private import write_private


def fingerprint(line: Line, record_id: str | None) -> str:
    """Return what names an input line: its content with its id, or with its number where it has no id of its own."""
    name = f"line {line.number}" if record_id is None else f"id {record_id}"
    return hashlib.blake2b(name.encode() + b"\0" + line.raw, digest_size=12).hexdigest()


def sibling(output: str, suffix: str) -> Path:
    """Return the path beside `output` with another ending: out/answers.jsonl -> out/answers.stats.json."""
    path = Path(output)
    return path.with_name(path.name.removesuffix(".jsonl") + suffix)


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` whole or not at all, readable by its owner only."""
    write_private(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS) + b"\n")


def check_writable(path: Path, key: str) -> None:
    """Raise ConfigError, beginning with `key`, where no file can be written at `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError
    except OSError:
        raise ConfigError(f"{key}: {path} cannot be written; choose another file") from None


class Journal:
    """Writes output lines in the asked order and knows which input lines are finished already.

    output: a path, or - for stdout (nothing to resume there). identity: what a resumed run must agree on;
    None for a file that is never resumed.
    """

    def __init__(
        self,
        output: str,
        identity: dict[str, Any] | None = None,
        *,
        order: str = "input",
        resume: bool = True,
        retry_failed: bool = False,
    ) -> None:
        self.output = output
        self.finished = KeySet()
        self.finished_ids = KeySet()
        self.failed_before = KeySet()  # those of `finished` that are error lines
        self.resumed = 0
        self._in_order = order == "input"
        self._waiting: dict[int, bytes] = {}
        self._next = 0
        path = Path(output)
        # pipes and devices (/dev/null, >(...)) take lines and keep none, so there is nothing to lock or to resume
        self.resumable = output != "-" and not output.startswith("/dev/") and (not path.exists() or path.is_file())
        self._file: IO[bytes] = self._open(path, identity, resume, retry_failed) if self.resumable else _stream(output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if self.resumable and not kind:
            os.fsync(self._file.fileno())
        if self.output != "-":
            # after an error of its own, the last line may still be in the buffer and fail again
            with suppress(OSError) if kind else nullcontext():
                self._file.close()

    def put(self, index: int, line: dict[str, Any] | bytes | None) -> None:
        """Write output line number `index`, or keep it until those before it came. None: nothing to write there.

        bytes: a line as it is, without its line end.

        Raises TypeError, nothing written, where `line` is no JSON (nested too deep, say); ConfigError on a full disk.
        """
        if isinstance(line, bytes):
            encoded = line + b"\n"
        else:
            encoded = b"" if line is None else orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        if not self._in_order:
            self._write(encoded)
            return
        self._waiting[index] = encoded
        while self._next in self._waiting:
            self._write(self._waiting.pop(self._next))
            self._next += 1

    def _write(self, encoded: bytes) -> None:
        if not encoded:
            return
        try:
            self._file.write(encoded)
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ConfigError(
                f"{self.output}: cannot be written ({error.strerror}); finished answers are kept"
            ) from None

    def _open(self, path: Path, identity: dict[str, Any] | None, resume: bool, retry_failed: bool) -> IO[bytes]:
        if path.suffix in (".gz", ".zst"):
            raise ConfigError(f"{path}: answers are appended one by one, which {path.suffix} cannot; compress it after")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file: IO[bytes] = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another --output") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{path}: another run is writing it; wait for it, or choose another --output") from None
        state = sibling(self.output, ".run.json")
        if os.fstat(file.fileno()).st_size:
            if not resume or identity is None:
                file = _set_aside(path, file)
            else:
                file = self._resume(path, file, state, identity, retry_failed)
        if identity is not None:
            try:
                write_json(state, {"config": identity})
            except OSError as error:
                raise ConfigError(f"{state}: cannot be written ({error.strerror}); choose another --output") from None
        return file

    def _resume(
        self, path: Path, file: IO[bytes], state: Path, identity: dict[str, Any], retry_failed: bool
    ) -> IO[bytes]:
        way_out = "; go on with the config that began it, choose another --output, or --no-resume (keeps it as a copy)"
        try:
            began = orjson.loads(state.read_bytes())["config"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{path}: holds lines, but {state.name} does not say which config wrote them{way_out}"
            ) from None
        changed = _difference(began, orjson.loads(orjson.dumps(identity)))
        if changed:
            raise ConfigError(f"{path}: was begun with another config: {changed}{way_out}")
        _drop_torn_line(file)
        if retry_failed:
            file = _without_error_lines(path, file)
        file.seek(0)
        for raw in file:
            key, name, failed = _finishes(raw)
            if key is None:
                continue  # not a line of ours: it stays, and finishes nothing
            self.finished.add(key)
            (self.failed_before if failed else self.finished_ids).add(key if failed else name)
            self.resumed += 1
        file.seek(0, os.SEEK_END)
        return file


def _stream(output: str) -> IO[bytes]:
    if output == "-":
        return sys.stdout.buffer
    try:
        return open(output, "wb")
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written ({error.strerror}); choose another --output") from None


def _drop_torn_line(file: IO[bytes]) -> None:
    """Cut off a last line without its line end, as a killed run leaves it."""
    size = os.fstat(file.fileno()).st_size
    end = size
    while end > 0:
        start = max(0, end - (1 << 16))
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)


def _finishes(raw: bytes) -> tuple[str | None, str, bool]:
    """Return the fingerprint, the id and the failure of an output line; a fingerprint of None where it is not ours."""
    try:
        line = orjson.loads(raw)
        key, name = line["fingerprint"], line["id"]
    except (ValueError, KeyError, TypeError):
        return None, "", False
    return (key, name, "error" in line) if isinstance(key, str) and isinstance(name, str) else (None, "", False)


def _without_error_lines(path: Path, file: IO[bytes]) -> IO[bytes]:
    """Replace the output by one without its error lines, whole or not at all, and return it open and locked."""
    draft = path.with_name(f".{path.name}.retry")
    draft.unlink(missing_ok=True)
    kept = draft.open("a+b")
    fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.seek(0)
    for raw in file:
        if not _finishes(raw)[2]:
            kept.write(raw)
    kept.flush()
    os.fsync(kept.fileno())
    draft.replace(path)
    file.close()
    return kept


def _set_aside(path: Path, file: IO[bytes]) -> IO[bytes]:
    """Move a file that is not to be resumed to NAME.1, NAME.2, ...: nothing written is ever lost."""
    number = 1
    while (old := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(old)
    file.close()
    fresh = path.open("a+b")
    fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fresh


def _difference(old: Any, new: Any, path: str = "") -> str:
    """Return "key: was A, is now B" for the first difference, or "" where there is none."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            inner = _difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            if inner:
                return inner
        return ""
    return "" if old == new else f"{path}: was {_shown(old)}, is now {_shown(new)}"


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."
