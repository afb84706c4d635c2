"""C++ built by this machine's compiler at first use and kept in the user's cache.

    >>> build_library('extern "C" int one() { return 1; }').one()
    1

Limit: a compiler with g++'s options; without one, or with a cache that does not load, callers need another way.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ragspec.host.cache import cache_dir, digest_of
from ragspec.host.machine import cpu_features

FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC")
PATIENCE_S = 120  # for the compiler


class Unbuilt(Exception):
    """The code cannot be built here; the message says why."""


def build_library(
    source: str,
    options: Sequence[str] = (),
    include: Path | None = None,
    keep_lock: bool = False,
) -> ctypes.CDLL:
    """Return C++ as a loaded library, built unless it is cached.

    Args:
        source: The code.
        options: The compiler's, beside FLAGS.
        include: A folder of headers.
        keep_lock: Keep the interpreter's lock during calls, which suits short ones.

    Raises:
        Unbuilt: There is no compiler, it fails, or the result does not load.
    """
    load = ctypes.PyDLL if keep_lock else ctypes.CDLL
    compiler, version = find_compiler()
    headers = [] if include is None else sorted(include.glob("*.h"))
    included = "".join(path.read_text(encoding="utf-8") for path in headers)
    options = [*FLAGS, *options]
    name = f"{digest_of(source, included, options, version, platform.machine(), cpu_features())}.so"
    with suppress(OSError, RuntimeError):  # not there, or damaged
        return load(str(cache_dir() / "native" / name))
    with tempfile.TemporaryDirectory() as draft:
        folders = [] if include is None else [f"-I{include}"]
        built = _compile(compiler, [*options, *folders], source, Path(draft))
        with suppress(OSError, RuntimeError):  # not writable, or mounted noexec
            return load(str(_kept(built, name)))
        try:
            return load(str(built))
        except OSError as error:
            raise Unbuilt(f"the built library cannot be loaded ({_brief(error)})") from error


def _kept(built: Path, name: str) -> Path:
    """Move a library to the user's cache atomically; return its path."""
    folder = cache_dir() / "native"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        os.replace(shutil.copy(built, draft), folder / name)
    return folder / name


def find_compiler() -> tuple[str, str]:
    """Return the C++ compiler and its version; GNU's first, since torch comes with its OpenMP. Raises Unbuilt."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            done = _run([path, "--version"])
            return path, done.stdout.partition("\n")[0]
    raise Unbuilt("no C++ compiler (g++) was found")


def _compile(compiler: str, flags: list[str], source: str, folder: Path) -> Path:
    path = folder / "library.so"
    (folder / "source.cpp").write_text(source, encoding="utf-8")
    done = _run([compiler, *flags, str(folder / "source.cpp"), "-o", str(path)])
    if done.returncode:
        raise Unbuilt(f"{Path(compiler).name} failed: {_brief(done.stderr, 200)}")
    return path


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unbuilt(f"{Path(command[0]).name} failed: {_brief(error)}") from error


def _brief(message: object, most: int = 120) -> str:
    return " ".join(str(message).split())[:most]
