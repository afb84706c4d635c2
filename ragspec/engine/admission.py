"""Which request gets which cache row: requests are looked at ahead, brought together by prefix, and start from what
another row has computed already."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable
from itertools import count, islice

from ragspec.engine.cache import RaggedCache
from ragspec.engine.prefix import grouped, shared
from ragspec.engine.proposers import Proposer
from ragspec.engine.row import Row
from ragspec.engine.sampling import Noise
from ragspec.feed import Feed
from ragspec.records import Request

WAIT = 16  # tokens that are just being computed, for which a request waits a step
AHEAD = 1.5  # times the slots needed, that a cache may grow by at once
SCAN = 256  # waiting requests looked at for one whose prefix is not being computed just now


class Waiting:
    """A request, or a row that was interrupted, waiting for a place. Tokens are packed: thousands may wait."""

    __slots__ = ("group", "request", "row", "tokens")

    def __init__(self, request: Request, group: int, row: Row | None = None) -> None:
        self.request = request
        self.group = group  # shared by requests of one prefix
        self.row = row
        self.tokens = array("i", row.tokens if row else request.token_ids)

    @property
    def slots(self) -> int:
        """Slots that its place needs."""
        return len(self.tokens) + self.request.sampling.max_new_tokens


class Place:
    """A cache row, and whose keys and values it holds: those of the row under way, or of the last one."""

    __slots__ = ("group", "left", "row")

    def __init__(self) -> None:
        self.row: Row | None = None
        self.left = array("i")
        self.group = -1

    def offers(self, tokens: array[int]) -> tuple[int, int]:
        """Return how many of `tokens` it holds now, and how many it will."""
        if self.row is None:
            held = shared(tokens, self.left)
            return held, held
        coming = shared(tokens, array("i", self.row.tokens))
        return min(coming, self.row.computed), coming


class Admission:
    """The waiting line and the places."""

    def __init__(self, requests: Iterable[Request], places: int, lookahead: int) -> None:
        self._source = Feed(requests)
        self._lookahead = lookahead
        self._line: deque[Waiting] = deque()
        self._groups = count()
        self._clear(places)

    def _clear(self, places: int) -> None:
        self.places = [Place() for _ in range(places)]
        self._free = list(range(places))  # longest unused first
        self._latest = 0  # a place that holds at least what all prompts have in common

    def rows(self) -> list[Row]:
        """Return the rows under way, by place."""
        return [place.row for place in self.places if place.row is not None]

    def release(self, row: Row) -> None:
        """Free the place of a finished row; what it computed stays until the place is needed."""
        place = self.places[row.place]
        place.row, place.left = None, array("i", row.tokens[: row.computed])
        self._free.append(row.place)

    def interrupt(self, places: int) -> None:
        """Send all rows back to the head of the line, and begin again with `places` empty places."""
        rows = sorted(self.rows(), key=lambda row: row.started)
        self._clear(places)
        for row in reversed(rows):
            row.place, row.computed = -1, 0
            self._line.appendleft(Waiting(row.request, next(self._groups), row))

    def give_up(self) -> Request:
        """Take the first of the line out of it: it does not even fit alone."""
        return self._take(0).request

    def look_ahead(self) -> None:
        """Take in the requests that are there, if none wait; wait for one only where no row is under way.

        What the input raises is raised here, and not where places are filled: it is no reason for fewer rows.
        """
        if self._line or not self._free:
            return
        fresh = self._source.take(max(self._lookahead, len(self._free)), wait=not self.rows())
        for start in range(0, len(fresh), self._lookahead):
            ahead = fresh[start : start + self._lookahead]
            for indices in grouped([array("i", request.token_ids) for request in ahead]):
                group = next(self._groups)
                self._line.extend(Waiting(ahead[i], group) for i in indices)

    def fill(self, cache: RaggedCache, proposer: Proposer) -> None:
        """Give free places to waiting requests, each with the longest prefix that another place has computed."""
        while self._free and (chosen := self._choose()) is not None:
            number, source, target, tokens = chosen
            waiting = self._line[number]
            if waiting.slots > cache.slots:
                cache.reserve(self._room(waiting.slots))  # may fail: nobody has moved
            self._take(number)
            self._free.remove(target)
            row = waiting.row or _new_row(waiting.request)
            place = self.places[target]
            place.row, place.group = row, waiting.group  # from here on, a failure sends the row back to the line
            row.place = target
            if tokens and source != target:
                cache.copy(source, target, tokens)
            proposer.admit(row, source, tokens)
            row.computed = tokens
            if not row.written:
                row.cached = tokens
            self._latest = target

    def _room(self, slots: int) -> int:
        """Return how many slots to reserve where `slots` are needed: up to AHEAD times that, if others soon need them.

        A cache that grows is copied; with one place, that costs little, and nobody may fail for what another needs.
        """
        if len(self.places) == 1:
            return slots
        soon = max(waiting.slots for waiting in islice(self._line, SCAN))
        return max(slots, min(soon, int(AHEAD * slots)))

    def _take(self, number: int) -> Waiting:
        waiting = self._line[number]
        del self._line[number]
        return waiting

    def _choose(self) -> tuple[int, int, int, int] | None:
        """Return the next to start: its number in the line, the place it begins like and how far, the place it gets.

        One whose prefix is being computed right now waits for it, and others overtake it. A free place that holds what
        waiting ones begin with is kept for these.
        """
        heads: dict[int, int] = {}  # of each group, the first in the line
        for number, waiting in enumerate(islice(self._line, SCAN)):
            heads.setdefault(waiting.group, number)
        spare = next((i for i in self._free if self.places[i].group not in heads), None)
        for group, number in heads.items():
            source, now, coming = self._best_source(self._line[number])
            if coming >= now + WAIT:
                continue
            own = [i for i in self._free if self.places[i].group == group]
            target = source if source in own else own[0] if own else spare
            if target is not None:
                return number, source, target, now
        if self.rows() or not heads:
            return None
        source, now, _ = self._best_source(self._line[0])
        return 0, source, source if source in self._free else self._free[0], now

    def _best_source(self, waiting: Waiting) -> tuple[int, int, int]:
        """Return the place that holds most of a request's tokens, how many now, and how many will be held somewhere."""
        last = len(waiting.tokens) - 1  # the last token is always computed: its logits are wanted
        source, best, most = self._latest, 0, 0
        for index, place in enumerate(self.places):
            if place.group == waiting.group or index == self._latest:
                now, coming = (min(last, tokens) for tokens in place.offers(waiting.tokens))
                most = max(most, coming)
                if now > best or (now == best and place.row is None):
                    source, best = index, now
        return source, best, most


def _new_row(request: Request) -> Row:
    noise = Noise(request.sampling.seed, request.id)
    return Row(request, list(request.token_ids), noise, time.perf_counter())
