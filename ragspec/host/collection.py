"""Garbage collection that skips what stays.

    >>> with collection_paused(): import torch, transformers
    >>> with frozen_heap(): answer()

Importing them creates half a million objects, all of which stay. Collecting meanwhile looks through them again and
again and frees nothing: a seventh of the time of a one-shot `ask`. While a run answers, each full collection would
hold up a GPU for a third of a second or more; vLLM's engine freezes what is loaded too.
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


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep the collector from scanning objects that exist already; nothing if the caller has frozen some itself."""
    mine = not gc.get_freeze_count()
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


def collect_all() -> None:
    """Unfreeze all objects, and run a full collection."""
    gc.unfreeze()
    gc.collect()
