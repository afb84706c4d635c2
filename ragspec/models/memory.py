"""Out of memory: the one error of a forward that a run survives.

    >>> try: logits = model(...)
    ... except MAY_BE_MEMORY as error: reason = out_of_memory(error)

Everything else that a forward raises is a bug of ours or of the model's code, and ends the run with its traceback.
"""

from __future__ import annotations

import logging

import torch

from ragspec.errors import flat

MAY_BE_MEMORY = (RuntimeError, MemoryError)  # torch.OutOfMemoryError is a RuntimeError
CPU_ALLOCATOR = "DefaultCPUAllocator"  # torch's, which raises a plain RuntimeError that begins with its name
log = logging.getLogger(__name__)


def out_of_memory(error: RuntimeError | MemoryError) -> str:
    """Return an out-of-memory error as one line for users. Raises any other error again.

    torch has no type of its own for its CPU allocator's error, so that one is told by its text (torch 2.6 to 2.15).
    """
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and CPU_ALLOCATOR not in str(error):
        raise error
    log.debug("a forward ran out of memory", exc_info=error)
    return f"{type(error).__name__}: {flat(error, 300)}"


def free_memory() -> None:
    """Give back what a failed forward left cached on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
