"""Ctrl-C held back while a line is written and counted, so that the two never disagree.

    >>> with Interruptions() as interruptions:
    ...     with interruptions.held_back():
    ...         pass

Limit: only the main thread is ever interrupted; entered in another one, this does nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


class Interruptions:
    """While entered, an interruption comes as usual, but not before the end of a `held_back` block."""

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._holding = False
        self._held = False

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        # a signal that is ignored, or that a C library handles, stays so
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._before)
        self._before = None

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Let an interruption come when the block is over. Keep it short."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            if self._held:
                self._held = False
                signal.raise_signal(signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._held = True
        elif self._before is not None:
            self._before(number, frame)
