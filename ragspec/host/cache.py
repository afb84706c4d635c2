"""The user's cache folder, and small JSON files in it: what this machine has shown, kept between runs.

    >>> cache = JsonCache("speeds")
    >>> cache.write({"load_s": 4.1}, "model", "8 cores")
    >>> cache.read("model", "8 cores")
    {'load_s': 4.1}

A cache that cannot be read or written is an empty one: it costs time, never answers.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ragspec.host.files import replacing


def cache_dir() -> Path:
    """Return $RAGSPEC_CACHE, else ragspec/ in the user's cache folder. Raises RuntimeError where there is no home."""
    own = os.environ.get("RAGSPEC_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ragspec"


def digest_of(*depends: object) -> str:
    """Return a short digest of the values that a cached result depends on."""
    return blake2b(repr(depends).encode(), digest_size=12).hexdigest()


class JsonCache:
    """JSON values in the folder `name` of the cache, a file each, found by what they depend on."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def folder(self) -> Path:
        """The folder, which is made by the first write. Raises RuntimeError where there is no home."""
        return cache_dir() / self._name

    def read(self, *depends: object) -> Any:
        """Return the value for `depends`, None where there is none."""
        with suppress(OSError, RuntimeError, ValueError):
            return json.loads((self.folder / f"{digest_of(*depends)}.json").read_text(encoding="utf-8"))
        return None

    def write(self, value: Any, *depends: object) -> None:
        """Keep a value, if the cache can be written."""
        with suppress(OSError, RuntimeError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # the processes of a benchmark measure the same things at the same time
            with replacing(self.folder / f"{digest_of(*depends)}.json", draft=str(os.getpid())) as file:
                file.write(json.dumps(value).encode())

    def files(self) -> list[Path]:
        """Return the files of all values."""
        return sorted(self.folder.glob("*.json"))
