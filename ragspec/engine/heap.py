"""Tell glibc's malloc to keep what is freed: tensors of megabytes come and go in every step, and memory handed back to
the system has to be paged in again (docs/lab/performance.md)."""

from __future__ import annotations

import ctypes
import platform
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of mallopt(3)
KEEP = 1 << 30  # bytes
LARGEST = 1 << 25  # bytes; the most that mallopt accepts for MMAP_THRESHOLD


def keep_freed_memory() -> None:
    """Keep freed memory, where the C library is glibc; elsewhere do nothing."""
    if platform.libc_ver()[0] == "glibc":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(TRIM_THRESHOLD, KEEP)
            libc.mallopt(MMAP_THRESHOLD, LARGEST)
