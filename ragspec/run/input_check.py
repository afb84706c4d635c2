"""The doctor's look at the input: whether it is there and may be read, without reading it."""

from __future__ import annotations

from pathlib import Path

from ragspec.config.places import InputConfig
from ragspec.errors import ConfigError
from ragspec.inputs.files import size_of
from ragspec.inputs.opening import open_source
from ragspec.run.doctor import Finding


def examine_input(given: InputConfig) -> Finding:
    """Return whether a run could open the input. A pipe is not opened: that would take what it holds."""
    if given.is_stdin:
        return Finding("ok", "input: stdin")
    paths = [Path(path) for path in given.path]
    if any(path.exists() and not (path.is_file() or path.is_dir()) for path in paths):
        return Finding("ok", f"input {given}: a pipe or device")
    try:
        with open_source(given):
            size = size_of(given)
    except ConfigError as error:
        return Finding("error", f"input: {error}")
    if size is None:
        return Finding("ok", f"input {given}: can be opened")
    if size == 0:
        return Finding("note", f"input {given}: empty")
    return Finding("ok", f"input {given}: {size / (1 << 20):,.1f} MiB")
