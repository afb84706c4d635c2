"""Entries judged by a few processes at once: the models are so small that threads would only wait for one another."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

from tests.zoo.entry import Entry, Outcome

MOST = 4


@contextmanager
def judging(entries: Iterable[Entry], kernels: bool = False) -> Iterator[dict[str, Future[Outcome]]]:
    """Return what will have come of each entry, by name. They are judged in this order."""
    workers = min(MOST, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start) as pool:
        yield {entry.name: pool.submit(_judge, entry, kernels) for entry in entries}
        pool.shutdown(cancel_futures=True)  # who leaves early waits for nobody


def _start() -> None:
    import torch

    from ragspec.host.quiet import quiet

    torch.set_num_threads(1)
    quiet()


def _judge(entry: Entry, kernels: bool) -> Outcome:
    from tests.zoo.judge import judge

    return judge(entry, kernels)
