"""An output that keeps nothing: stdout, a pipe or a device.

>>> OutStream("-").append(b"{}\\n")
"""

from __future__ import annotations

import errno
import sys
from typing import Any

from ragspec.outputs.linefile import write_all


class OutStream:
    """`output` (- for stdout), written line by line. Raises OSError."""

    def __init__(self, output: str) -> None:
        self._own = output != "-"
        self._file: Any = open(output, "wb", buffering=0) if self._own else _stdout()  # noqa: SIM115 (see close)

    def append(self, line: bytes) -> None:
        """Write a line."""
        write_all(self._file, line)

    def sync(self) -> None:
        """There is nothing that a power cut would spare."""

    def close(self) -> None:
        """Close it, unless it is stdout."""
        if self._own:
            self._file.close()


def _stdout() -> Any:
    """Return stdout without its buffer: what a reader who has gone did not take must not come up again at exit."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, "stdout is closed")
    sys.stdout.flush()
    return getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
