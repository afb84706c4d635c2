"""Keys and values of prompts' prefixes on disk: a file for every UNIT tokens, found by the hash of all up to them.

    >>> store = PrefixStore(Path("prefixes"), most_bytes=20 * 10**9)
    >>> names = chained(b"what computes them", prompt)
    >>> store.put(names[0], Prefix(tensors, seconds_per_token=0.002))
    >>> store.get(names[0])

Prefixes that begin alike share the files of their common part. A file is written whole or not at all, and read only if
its own hash says that it is as it was written, so any number of processes may use a folder at once. Least recently used
files are deleted. Source of chained hashes: vLLM's prefix cache. Limit: what is less than UNIT tokens is not kept.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path

import torch

from ragspec.host.files import replacing

UNIT = 256  # tokens of a file: whole blocks of every cache
FORM = "1"  # increase when what files hold changes
SUFFIX = ".safetensors"
NAME = re.compile(r"(\d{5})-[0-9a-f]{40}\.safetensors")
DRAFT = re.compile(rf"\.{NAME.pattern}\.[0-9.]+")
ABANDONED_S = 3600.0  # age of a file that nobody goes on writing
SPARE = 1 << 30  # bytes of the disk that stay free
ABOUT, DIGEST = "about", "digest"  # in a file's metadata


class Damaged(Exception):
    """A file is not as it was written."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """UNIT tokens. tensors: of each layer, keys and values, (kv_heads, UNIT, head_dim), on the CPU.

    seconds_per_token: what computing them took.
    """

    tensors: Sequence[torch.Tensor]
    seconds_per_token: float


def chained(root: bytes, tokens: Sequence[int]) -> list[str]:
    """Return the names of a prompt's whole units. root: tells what computes keys and values from any other."""
    names, state = [], sha256(FORM.encode() + root).digest()
    for end in range(UNIT, len(tokens) + 1, UNIT):
        state = sha256(state + array("q", tokens[end - UNIT : end]).tobytes()).digest()
        names.append(f"{end // UNIT - 1:05d}-{state.hex()[:40]}{SUFFIX}")
    return names


class PrefixStore:
    """A folder of prefixes. most_bytes: of all its files."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most = most_bytes
        self._drafts = count()

    def holds(self, name: str) -> bool:
        """Return whether there is a file of that name."""
        return os.path.exists(self._folder / name)

    def get(self, name: str) -> Prefix | None:
        """Return what a file holds, None if there is none. Raises Damaged, without the file then; OSError."""
        path = self._folder / name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return _read(name, content)
        except Damaged:
            with suppress(OSError):
                path.unlink()
            raise

    def put(self, name: str, prefix: Prefix) -> bool:
        """Write a file, unless it is there; return whether it was written. Raises OSError."""
        if self.holds(name):
            return False
        content = _written(name, prefix)
        self._make_room(len(content))
        path, draft = self._folder / name, f"{os.getpid()}.{next(self._drafts)}"
        try:
            with replacing(path, draft=draft) as file:
                file.write(content)
        except BaseException:
            with suppress(OSError):
                path.with_name(f".{name}.{draft}").unlink(missing_ok=True)
            raise
        return True

    def touch(self, names: Sequence[str]) -> None:
        """Mark files as used just now, the first ones last: others need them, so they are to be deleted last."""
        now = time.time_ns()
        for behind, name in enumerate(names):
            with suppress(OSError):
                os.utime(self._folder / name, ns=(now - behind, now - behind))

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files until one of `size` bytes fits. Raises OSError if it cannot."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if size > self._most:
            raise OSError(errno.EFBIG, f"{UNIT} tokens take {size:,} bytes, and it may have {self._most:,}")
        if shutil.disk_usage(self._folder).free < size + SPARE:
            raise OSError(errno.ENOSPC, "the disk is almost full")
        self.trim(self._most - size)

    def trim(self, most_bytes: int | None = None) -> None:
        """Delete the least recently used files beyond what all may have, or `most_bytes`. Raises OSError."""
        files = sorted(self._files())
        total, most = sum(each for _, _, _, each in files), self._most if most_bytes is None else most_bytes
        for _, _, path, each in files:
            if total <= most:
                break
            with suppress(FileNotFoundError):  # another process was quicker
                os.unlink(path)
            total -= each

    def _files(self) -> Iterator[tuple[int, int, str, int]]:
        """Yield (time of last use, minus its place in a prompt, path, bytes) of every file; delete abandoned ones."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                own = NAME.fullmatch(entry.name)
                if own is None and DRAFT.fullmatch(entry.name) is None:
                    continue
                with suppress(FileNotFoundError):
                    found = entry.stat()
                    if own is not None:
                        yield found.st_mtime_ns, -int(own[1]), entry.path, found.st_size
                    elif time.time() - found.st_mtime > ABANDONED_S:
                        os.unlink(entry.path)


# -- files -----------------------------------------------------------------------------------------


def _written(name: str, prefix: Prefix) -> bytes:
    from safetensors.torch import save

    about = json.dumps({"name": name, "seconds_per_token": prefix.seconds_per_token})
    tensors = [each.contiguous() for each in prefix.tensors]
    named = {f"{at:05d}": tensor for at, tensor in enumerate(tensors)}
    content: bytes = save(named, {ABOUT: about, DIGEST: _digest(about, tensors)})
    return content


def _read(name: str, content: bytes) -> Prefix:
    """Return what a file holds. Raises Damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        found = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        text, digest = header[ABOUT], header[DIGEST]
    except (SafetensorError, ValueError, KeyError) as error:
        raise Damaged(name) from error
    tensors = [found[each] for each in sorted(found)]
    if digest != _digest(text, tensors):
        raise Damaged(name)
    about = json.loads(text)
    if about["name"] != name:
        raise Damaged(name)
    return Prefix(tensors, about["seconds_per_token"])


def _digest(about: str, tensors: Iterable[torch.Tensor]) -> str:
    """Return the hash of all that a file says."""
    found = sha256(about.encode())
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.view(torch.uint8).numpy().data)
    return found.hexdigest()
