"""What a worker is to answer and what it has answered, between the thread that talks and the one that works."""

from __future__ import annotations

import time
from collections import deque
from threading import Condition
from typing import Literal, Self

from ragspec.outputs.answers import Failed
from ragspec.run.answering import Answered, Asked

End = Literal["pass", "run"]
LINGER_S = 0.02  # that a first line waits for more, so that lines travel together


class Inbox:
    """Records on their way to the runner (a Pollable, see inputs/feed.py), given to it while it works.

    over: whether the last pass has ended; otherwise another may be iterated over after this one.
    """

    def __init__(self) -> None:
        self.over = False
        self._waiting: deque[Asked | End] = deque()
        self._changed = Condition()
        self._dry = False  # whether the runner found nothing since the last look

    def add(self, asked: list[Asked], end: End | None = None) -> None:
        """Take in records. end: of what they are the last."""
        with self._changed:
            self._waiting.extend(asked)
            if end:
                self._waiting.append(end)
            self._changed.notify()

    def take_back(self, most: int) -> list[int]:
        """Give up the last `most` records that the runner has not taken, and return their lines."""
        found: list[int] = []
        with self._changed:
            while len(found) < most and self._waiting and not isinstance(last := self._waiting[-1], str):
                self._waiting.pop()
                found.append(last.index)
        return found

    def look(self) -> tuple[int, bool]:
        """Return how many records wait, and whether the runner had to wait since the last look."""
        with self._changed:
            dry, self._dry = self._dry, False
            return sum(not isinstance(each, str) for each in self._waiting), dry

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Asked:
        with self._changed:
            while not self._waiting:
                self._dry = True
                self._changed.wait()
            return self._next()

    def poll(self) -> Asked | None:
        """Return the next record, or None if there is none yet. Raises StopIteration if none will come."""
        with self._changed:
            if self._waiting:
                return self._next()
            self._dry = True
            return None

    def _next(self) -> Asked:
        found = self._waiting.popleft()
        if isinstance(found, str):
            self.over = found == "run"
            raise StopIteration
        return found


class Outbox:
    """Lines and failures on their way to the driver: an Outlet (run/answering.py)."""

    def __init__(self) -> None:
        self._lines: list[Answered] = []
        self._failures: list[tuple[int, Failed]] = []
        self._closed = False
        self._changed = Condition()

    def put(self, answered: Answered) -> None:
        """Take a line."""
        with self._changed:
            self._lines.append(answered)
            self._changed.notify()

    def fail(self, index: int, failed: Failed) -> None:
        """Take the reason why a record has no line."""
        with self._changed:
            self._failures.append((index, failed))
            self._changed.notify()

    def close(self) -> None:
        """Nothing more will come: nobody need wait for it."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, wait_s: float) -> tuple[list[Answered], list[tuple[int, Failed]]]:
        """Return what is there; wait up to `wait_s` seconds for it."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._closed or self._lines or self._failures, wait_s)
            closed = self._closed
        if arrived and not closed:
            time.sleep(min(LINGER_S, wait_s))
        with self._changed:
            taken = self._lines, self._failures
            self._lines, self._failures = [], []
            return taken
