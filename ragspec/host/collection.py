"""Garbage collection that does not look at what stays.

    >>> with collection_paused(): import torch, transformers
    >>> with old_objects_exempt(): answer()

Importing them creates half a million objects, all of which stay. Collecting meanwhile looks through them again and
again and frees nothing: a seventh of the time of a one-shot `ask`. While a run answers, each full collection would
hold up a GPU for a third of a second or more; vLLM's engine exempts what is loaded too.
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
def old_objects_exempt() -> Iterator[None]:
    """Exempt the objects that exist from collection, unless somebody has exempted some already."""
    mine = not gc.get_freeze_count()
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


def collect_all() -> None:
    """Collect at once, among all objects: exempt ones are so no longer."""
    gc.unfreeze()
    gc.collect()
