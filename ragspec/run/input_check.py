"""The doctor's look at the input: whether it is there and may be read, without reading it."""

from __future__ import annotations

import os
from pathlib import Path

from ragspec.run.doctor import Finding


def examine_input(name: str) -> Finding:
    """Return whether a run could open the input `name`. A pipe is not opened: that would take what it holds."""
    if name == "-":
        return Finding("ok", "input: stdin")
    path = Path(name)
    if not path.exists():
        return Finding("error", f"input: {name}: no such file")
    if path.is_dir():
        return Finding("error", f"input: {name}: is a folder, not a file")
    if not os.access(path, os.R_OK):
        return Finding("error", f"input: {name}: cannot be read (permission denied)")
    if not path.is_file():
        return Finding("ok", f"input {name}: a pipe or device")
    if (size := path.stat().st_size) == 0:
        return Finding("note", f"input {name}: empty")
    return Finding("ok", f"input {name}: {size / (1 << 20):,.1f} MiB")
