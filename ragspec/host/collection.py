"""Garbage collection that waits while libraries and models load.

    >>> with collection_paused(): import torch, transformers

Importing them creates half a million objects, all of which stay. Collecting meanwhile looks through them again and
again and frees nothing: a seventh of the time of a one-shot `ask`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collector, unless it is off already."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
