"""A pipe that is kept open: it is read on a thread, so that what has arrived is known without waiting for more.

    >>> pipe = Pipe(0); lines = Live(io.BufferedReader(pipe), pipe, size=len); lines.poll()

Limit: POSIX; one thread may use the reading end.
"""

from __future__ import annotations

import io
import os
import selectors
from collections import deque
from collections.abc import Callable, Iterable
from threading import Condition, Thread
from typing import Generic, Self, TypeVar

T = TypeVar("T")
MOST = 4096  # items that are read ahead
MOST_BYTES = 32 << 20  # of them together, unless there is only one


class Pipe(io.RawIOBase):
    """The bytes of a file that may keep its reader waiting. `end` ends a read that waits, in another thread too."""

    def __init__(self, descriptor: int) -> None:
        self.waits: Callable[[bool], None] = lambda _: None  # told when a read begins to wait, and when it continues
        self._descriptor = descriptor
        self._woken, self._waker = os.pipe()

    def readable(self) -> bool:
        """Return True: this stream is for reading."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` with what has arrived, at least one byte, and return how many; 0 at the end."""
        with selectors.PollSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            ready = selector.select(0)
            if not ready:
                self.waits(True)
                ready = selector.select()
                self.waits(False)
        if any(key.fd == self._woken for key, _ in ready):
            return 0
        return os.readv(self._descriptor, [buffer])

    def end(self) -> None:
        """Let all reads return 0 from now on."""
        os.write(self._waker, b".")

    def close(self) -> None:
        """Free what `end` needs; the file itself is its owner's."""
        if not self.closed:
            os.close(self._woken)
            os.close(self._waker)
        super().close()


class Live(Generic[T]):
    """The items of `source`, which reads `pipe`, in a bounded number ahead. size: bytes of an item, about.

    What the source raises is raised here, after the items before it.
    """

    def __init__(self, source: Iterable[T], pipe: Pipe, size: Callable[[T], int]) -> None:
        self._source = source
        self._pipe = pipe
        self._size = size
        self._items: deque[T] = deque()
        self._bytes = 0
        self._quiet = False  # whether the thread waits for bytes
        self._ended = False
        self._broken: BaseException | None = None
        self._changed = Condition()
        pipe.waits = self._waits
        self._thread = Thread(target=self._read, name="input", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended)
            return self._pop()

    def poll(self) -> T | None:
        """Return the next item, or None if the writer has written no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended or self._quiet)
            return self._pop() if self._items or self._ended else None

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._pipe.end()
        self._thread.join()

    def _pop(self) -> T:
        if self._items:
            item = self._items.popleft()
            self._bytes -= self._size(item)
            self._changed.notify_all()
            return item
        if self._broken is not None:
            raise self._broken
        raise StopIteration

    def _waits(self, quiet: bool) -> None:
        with self._changed:
            self._quiet = quiet
            self._changed.notify_all()

    def _read(self) -> None:
        broken: BaseException | None = None
        try:
            for item in self._source:
                if not self._push(item):
                    break
        except BaseException as error:  # whatever it is, it is raised where the items are read
            broken = error
        with self._changed:
            self._broken, self._ended = broken, True
            self._changed.notify_all()

    def _push(self, item: T) -> bool:
        """Wait for room and add an item; return whether anybody wants more."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or not self._items or (len(self._items) < MOST and self._bytes < MOST_BYTES)
            )
            self._items.append(item)
            self._bytes += self._size(item)
            self._changed.notify_all()
            return not self._ended
