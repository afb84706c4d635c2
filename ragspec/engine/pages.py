"""Memory that costs nothing until it is written: the system clears a page when it is first used."""

from __future__ import annotations

import errno
import math
import mmap
from contextlib import suppress

import torch


def zeros(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return zeros of the type of `like`, on its device. MemoryError where the system has no room for them.

    They begin where a page does, and so a line of the processor's cache: vectors are then read in one piece.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not size:
        return like.new_zeros(shape)
    return torch.frombuffer(_pages(size), dtype=torch.uint8).view(like.dtype).view(shape)


def _pages(size: int) -> mmap.mmap:
    """Return `size` bytes, in small pages.

    In huge ones a row's first token would bring all of the row's room with it, which takes its time to clear and may
    never be used; attention reads them no faster (docs/lab/log.md).
    """
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"no room for {size:,} bytes") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages
