"""Iterators between pipeline stages that can be asked for the items available now; pipes read on a thread.

    >>> feed = Feed("abc"); feed.take(2, wait=True), next(feed), feed.take(2, wait=True)
    (['a', 'b'], 'c', [])

`next` blocks for the writer of the input, `poll` does not. On a plain iterable they are the same. Limit: pipes need
POSIX, and one thread at the reading end.
"""

from __future__ import annotations

import io
import os
import selectors
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Condition, Thread
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from ragspec.errors import RagspecError

T = TypeVar("T")
S = TypeVar("S")
T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Pollable(Protocol[T_co]):
    """An iterator with a non-blocking `poll`."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> T_co: ...

    def poll(self) -> T_co | None:
        """Return the next item, or None if none is available yet. Raises StopIteration at the end."""


class Feed(Generic[T]):
    """An iterable's first `most` items as a Pollable, with `put_back` for items taken too early."""

    def __init__(self, items: Iterable[T], most: int | None = None) -> None:
        self._source: Iterator[T] = iter(items)
        self._poll = self._source.poll if isinstance(self._source, Pollable) else self._source.__next__
        self._left = most
        self._returned: deque[T] = deque()
        self._broken: RagspecError | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        return self._returned.popleft() if self._returned else self._pull(self._source.__next__)

    def poll(self) -> T | None:
        """Return the next item, or None if none is available yet. Raises StopIteration at the end."""
        return self._returned.popleft() if self._returned else self._pull(self._poll)

    def take(self, most: int, *, wait: bool) -> list[T]:
        """Return up to `most` available items. wait: block for at least one, except at the end.

        An error of the input is raised as late as possible: when nothing precedes it and `wait` is set, that is, when
        the caller has nothing else to do.
        """
        taken: list[T] = []
        try:
            while len(taken) < most and (item := next(self) if wait and not taken else self.poll()) is not None:
                taken.append(item)
        except StopIteration:
            pass
        except RagspecError as error:
            self._broken = error
            if wait and not taken:
                raise
        return taken

    def put_back(self, items: Iterable[T]) -> None:
        """Return `items` to the front of the feed."""
        self._returned.extendleft(reversed(list(items)))

    @property
    def over(self) -> bool:
        """Return whether the feed is known to be exhausted, apart from an error."""
        return not self._returned and (self._left == 0 or self._broken is not None)

    def close(self) -> None:
        """Close the source, if it can be closed."""
        close: Callable[[], None] | None = getattr(self._source, "close", None)
        if close is not None:
            close()

    def _pull(self, pull: Callable[[], S]) -> S:
        if self._broken is not None:
            raise self._broken
        if self._left == 0:
            raise StopIteration
        try:
            item = pull()
        except StopIteration:
            self._left = 0
            raise
        if self._left is not None and item is not None:
            self._left -= 1
        return item


class Spread(Generic[S, T]):
    """A Pollable that maps each item of `source` to zero or more items with `make`.

    rest: makes the final items when the source ends or fails.
    """

    def __init__(
        self, source: Feed[S], make: Callable[[S], Iterable[T]], rest: Callable[[], Iterable[T]] | None = None
    ) -> None:
        self._source = source
        self._make = make
        self._rest = rest
        self._end: StopIteration | RagspecError | None = None
        self._made: deque[T] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        while not self._made:
            self._make_of(self._source.__next__)
        return self._made.popleft()

    def poll(self) -> T | None:
        """Return the next made item, or None if the source has none available yet."""
        while not self._made:
            if not self._make_of(self._source.poll):
                return None
        return self._made.popleft()

    def _make_of(self, pull: Callable[[], S | None]) -> bool:
        """Expand the next item, or the rest at the end; return False if no item is available yet."""
        if self._end is not None:
            raise self._end
        try:
            item = pull()
        except (StopIteration, RagspecError) as end:
            if self._rest is None:
                raise
            self._end = end
            self._made.extend(self._rest())
            return True
        if item is not None:
            self._made.extend(self._make(item))
        return item is not None

    def close(self) -> None:
        """Close the source."""
        self._source.close()


# -- pipes read on a thread ------------------------------------------------------------------------

MOST = 4096  # items read ahead
MOST_BYTES = 32 << 20  # their total size, unless there is only one


class Pipe(io.RawIOBase):
    """The bytes of a descriptor whose reads may block. `end` unblocks a read, also from another thread."""

    def __init__(self, descriptor: int) -> None:
        self.waits: Callable[[bool], None] = lambda _: None  # called with True before a read blocks, with False after
        self._descriptor = descriptor
        self._woken, self._waker = os.pipe()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` with the bytes that have arrived, at least one, and return how many; 0 at the end."""
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
        """Make this and all later reads return 0."""
        os.write(self._waker, b".")

    def close(self) -> None:
        """Free the wake-up pipe; the descriptor belongs to its owner."""
        if not self.closed:
            os.close(self._woken)
            os.close(self._waker)
        super().close()


class LivePipe(Generic[T]):
    """The items of `source`, which reads `pipe`, read ahead on a thread in bounded number.

        >>> pipe = Pipe(0); lines = LivePipe(io.BufferedReader(pipe), pipe, size=len); lines.poll()

    size: approximate bytes of an item. An error of the source is raised after the items before it.
    """

    def __init__(self, source: Iterable[T], pipe: Pipe, size: Callable[[T], int]) -> None:
        self._source = source
        self._pipe = pipe
        self._size = size
        self._items: deque[T] = deque()
        self._bytes = 0
        self._blocked = False  # whether the thread is blocked on the pipe
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
        """Return the next item, or None if the writer has written no more yet."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended or self._blocked)
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
            self._blocked = quiet
            self._changed.notify_all()

    def _read(self) -> None:
        broken: BaseException | None = None
        try:
            for item in self._source:
                if not self._push(item):
                    break
        except BaseException as error:  # raised again where the items are read
            broken = error
        with self._changed:
            self._broken, self._ended = broken, True
            self._changed.notify_all()

    def _push(self, item: T) -> bool:
        """Wait for room and append an item; return whether reading should continue."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or not self._items or (len(self._items) < MOST and self._bytes < MOST_BYTES)
            )
            self._items.append(item)
            self._bytes += self._size(item)
            self._changed.notify_all()
            return not self._ended
