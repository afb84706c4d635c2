"""glibc's malloc told to keep what it freed: tensors of some megabytes come and go in every step, and each return to
the system costs their pages again (docs/performance.md)."""

from __future__ import annotations

import ctypes
import platform
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of mallopt(3)
KEEP = 1 << 30
LARGEST = 1 << 25  # the most that mallopt takes for the second


def keep_freed_memory() -> None:
    """Do it, where the C library is glibc."""
    if platform.libc_ver()[0] == "glibc":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(TRIM_THRESHOLD, KEEP)
            libc.mallopt(MMAP_THRESHOLD, LARGEST)
