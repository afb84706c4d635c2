"""Out-of-memory errors, the only errors of a forward that a run survives, and those of a device that has failed.

    >>> try: logits = model(...)
    ... except MAY_BE_MEMORY as error: reason = out_of_memory(error)

Any other error of a forward is a bug, of ours or of the model's code, and ends the run with its traceback.
"""

from __future__ import annotations

import logging

import torch

from ragspec.errors import flat

MAY_BE_MEMORY = (RuntimeError, MemoryError)  # torch.OutOfMemoryError is a RuntimeError
# a device that has failed computes nothing more in this process; torch before 2.9 raises a plain RuntimeError
DEVICE_FAILED: tuple[type[Exception], ...] = tuple(filter(None, [getattr(torch, "AcceleratorError", None)]))
CPU_ALLOCATOR = "DefaultCPUAllocator"  # torch's, whose RuntimeError names it
log = logging.getLogger(__name__)


def out_of_memory(error: RuntimeError | MemoryError) -> str:
    """Return an out-of-memory error as one line for users. Re-raises any other error."""
    if not is_out_of_memory(error):
        raise error
    log.debug("a forward ran out of memory", exc_info=error)
    return f"{type(error).__name__}: {flat(error, 300)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory has run out.

    torch has no exception type for its CPU allocator, so that error is recognised by its text (torch 2.6 to 2.15).
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error)


def free_memory() -> None:
    """Release GPU memory that a failed forward left cached."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
