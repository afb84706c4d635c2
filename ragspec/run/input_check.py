"""The doctor's look at the input: whether it is there and may be read, without reading it."""

from __future__ import annotations

from pathlib import Path

from ragspec.errors import ConfigError
from ragspec.inputs.base import open_source
from ragspec.run.doctor import Finding


def examine_input(name: str) -> Finding:
    """Return whether a run could open the input `name`. A pipe is not opened: that would take what it holds."""
    if name == "-":
        return Finding("ok", "input: stdin")
    path = Path(name)
    if path.exists() and not (path.is_file() or path.is_dir()):
        return Finding("ok", f"input {name}: a pipe or device")
    try:
        with open_source(name):
            size = path.stat().st_size
    except ConfigError as error:
        return Finding("error", f"input: {error}")
    if size == 0:
        return Finding("note", f"input {name}: empty")
    return Finding("ok", f"input {name}: {size / (1 << 20):,.1f} MiB")
