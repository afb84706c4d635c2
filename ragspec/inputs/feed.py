"""What flows from stage to stage: an iterator that can also be asked for what is available right now.

    >>> feed = Feed("abc"); feed.take(2, wait=True), next(feed), feed.take(2, wait=True)
    (['a', 'b'], 'c', [])

`next` waits for whoever writes the input, `poll` does not. On a plain iterable they are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from ragspec.errors import RagspecError

T = TypeVar("T")
S = TypeVar("S")
T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Pollable(Protocol[T_co]):
    """An iterator with `poll`."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> T_co: ...

    def poll(self) -> T_co | None:
        """Return the next item, or None if there is none yet. Raises StopIteration if none will come."""


class Feed(Generic[T]):
    """Any iterable as a Pollable, the first `most` items of it, with room for items that were taken too early."""

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
        """Return the next item, or None if there is none yet. Raises StopIteration if none will come."""
        return self._returned.popleft() if self._returned else self._pull(self._poll)

    def take(self, most: int, *, wait: bool) -> list[T]:
        """Return up to `most` items that are available. wait: at least one, except at the end.

        If the input breaks off, its error is raised as late as possible: when nothing came before it and `wait` is set,
        that is, when the caller has nothing else to do.
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
        """Let `items` come next."""
        self._returned.extendleft(reversed(list(items)))

    @property
    def over(self) -> bool:
        """Whether it is known that nothing more will come, except an error."""
        return not self._returned and (self._left == 0 or self._broken is not None)

    def close(self) -> None:
        """End what the source does ahead of its reader, if anything."""
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
    """What `make` makes of the items of `source`: none, one or several of each.

    rest: makes what is left at the source's end, or where it breaks off.
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
        """Return what is made of an available item, or None if there is none yet."""
        while not self._made:
            if not self._make_of(self._source.poll):
                return None
        return self._made.popleft()

    def _make_of(self, pull: Callable[[], S | None]) -> bool:
        """Make something of the next item, or what is left; return False if there is no item yet."""
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
