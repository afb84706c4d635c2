"""Which rows of a step hold the same first tokens, so that they may attend to them together (kv_splits.py)."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from ragspec.engine.kv.budget import KvBudget
from ragspec.engine.kv.prefix_blocks import LEAST, grouped, shared
from ragspec.engine.model.kv_splits import PrefixGroup
from ragspec.engine.request_state import CacheRow, RequestState, Start
from ragspec.engine.sampling import Noise
from ragspec.errors import RecordError
from ragspec.inputs.feed import Feed
from ragspec.records import Failure, Request

REMEMBERED = 1 << 14  # pairs of requests


class PrefixGroups:
    """Finds the rows of a step that hold the same first tokens, by their prompts.

    agree: whether the tokens of two rows may be shared (Frequencies.agree).
    """

    def __init__(self, agree: Callable[[int, int, int], bool]) -> None:
        self._agree = agree
        self._common: dict[tuple[int, int], int] = {}  # by the indices of two requests

    def among(self, rows: Sequence[RequestState]) -> list[PrefixGroup]:
        """Return groups of rows; no row is in two of them."""
        alike: dict[tuple[int, ...], list[RequestState]] = {}
        for row in rows:
            alike.setdefault(tuple(row.request.token_ids[:LEAST]), []).append(row)
        return [group for some in alike.values() if len(some) > 1 for group in self._groups(some)]

    def read(self, rows: Sequence[RequestState]) -> float:
        """Return the share of the rows' tokens that a step reads which reads once what they have in common."""
        common = sum(sum(group.tokens.values()) for group in self.among(rows))
        return 1 - common / max(1, sum(len(row.tokens) for row in rows))

    def _groups(self, rows: Sequence[RequestState]) -> list[PrefixGroup]:
        groups = []
        while len(rows) > 1:
            leader, others = rows[0], rows[1:]
            tokens = {row.place: self._shared(leader, row) for row in others}
            found = {place: count for place, count in tokens.items() if count >= LEAST}
            if found:
                groups.append(PrefixGroup(leader.place, found))
            rows = [row for row in others if row.place not in found]
        return groups

    def _shared(self, one: RequestState, other: RequestState) -> int:
        pair = one.request.index, other.request.index
        if pair not in self._common:
            if len(self._common) >= REMEMBERED:
                self._common.clear()
            self._common[pair] = shared(one.request.token_ids, other.request.token_ids)
        tokens = min(self._common[pair], one.computed, other.computed)
        return tokens if self._agree(one.base, other.base, tokens) else 0


# -- which request gets which place (a row of the cache): requests are read ahead, grouped by prefix, and star
#
# another row has already computed.
#
# Nothing here touches the cache: a Start says what is to be copied.


WAIT = 16  # tokens that another row is computing just now, for which a request waits
SCAN = 256  # waiting requests looked at for one that can start

Agree = Callable[[int, int, int], bool]


class WaitingRequest:
    """A request, or a row that was sent back, waiting for a place. Tokens are packed: thousands may wait."""

    __slots__ = ("group", "request", "row", "tokens")

    def __init__(self, request: Request, group: int = -1, row: RequestState | None = None) -> None:
        self.request = request
        self.group = group  # shared by requests of one prefix
        self.row = row
        self.tokens = array("i", row.tokens if row else request.token_ids)

    @property
    def base(self) -> int:
        """Tokens that its row begins with (Row.base)."""
        return self.row.base if self.row else len(self.tokens)

    @property
    def most(self) -> int:
        """Tokens that its row may come to have."""
        return len(self.request.token_ids) + self.request.sampling.max_new_tokens


@dataclass(frozen=True, slots=True)
class _Choice:
    """What starts next: its number in the queue, and the rest of its Start."""

    number: int
    donor: int
    target: int
    tokens: int


class Scheduler:
    """The queue and the places.

    step: most tokens that a row grows by in a step. agree(base, other, tokens): whether rows that began with `base` and
    `other` tokens compute the same for the first `tokens` (Frequencies.agree). start: makes the row of a request.
    refusal: why a request cannot be answered, "" where it can.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        places: int,
        lookahead: int,
        *,
        start: Callable[[Request], RequestState] | None = None,
        room: KvBudget | None = None,
        step: int = 1,
        agree: Agree | None = None,
        refusal: Callable[[Request], str] | None = None,
    ) -> None:
        self._requests = Feed(requests)
        self._lookahead = lookahead
        self._start = start or new_row
        self._room = room or KvBudget()
        self._step = step
        self._agree = agree or (lambda base, other, tokens: True)
        self._refusal_of = refusal or (lambda request: "")
        self._queue: deque[WaitingRequest] = deque()
        self._groups = count()
        self._clear(places)

    def _clear(self, places: int) -> None:
        self.places = [CacheRow() for _ in range(places)]
        self._free = list(range(places))  # longest unused first
        self._latest = 0  # a place that holds at least what all prompts have in common

    def rows(self) -> list[RequestState]:
        """Return the rows under way, by place."""
        return [place.row for place in self.places if place.row is not None]

    def release(self, row: RequestState) -> None:
        """Free the place of a finished row."""
        self.places[row.place].leave()
        self._free.append(row.place)

    def interrupt(self, places: int, first: RequestState | None = None) -> None:
        """Send all rows back to the head of the queue, `first` before the others; have `places` empty places."""
        rows = sorted(self.rows(), key=lambda row: (row is not first, row.started))
        self._clear(places)
        for row in reversed(rows):
            row.place, row.computed = -1, 0
            self._queue.appendleft(WaitingRequest(row.request, next(self._groups), row))

    def widen(self, most: int) -> int:
        """Add places, up to `most`, while every row could finish in them; return how many there are."""
        needs = [len(row.request.token_ids) + row.request.sampling.max_new_tokens for row in self.rows()]
        longest = max([*needs, *(waiting.most for waiting in islice(self._queue, 1))], default=1)
        for _ in range(len(self.places), min(most, self._room.rows(longest))):
            self._free.append(len(self.places))
            self.places.append(CacheRow())
        return len(self.places)

    def forget_beyond(self, slots: int) -> None:
        """Places hold `slots` tokens at most from now on."""
        for place in self.places:
            del place.left[slots:]

    def idle(self) -> list[int]:
        """Return the places without a row whose tokens no waiting request may begin with."""
        wanted = {waiting.group for waiting in self._queue}
        places = enumerate(self.places)
        return [number for number, place in places if place.row is None and place.group not in wanted]

    def forget(self, lost: Mapping[int, int]) -> None:
        """Places hold no more than so many tokens of the rows that left them."""
        for number, tokens in lost.items():
            del self.places[number].left[tokens:]

    def coming(self) -> tuple[int, int]:
        """Return the longest prompt of the rows under way and of those read ahead, and the most tokens one may get."""
        requests = [*(row.request for row in self.rows()), *(waiting.request for waiting in self._queue)]
        prompt = max((len(request.token_ids) for request in requests), default=0)
        return prompt, max((len(r.token_ids) + r.sampling.max_new_tokens for r in requests), default=0)

    def admit(self) -> list[Start | Failure]:
        """Give free places to waiting requests, each with the longest prefix that some place has computed.

        Begin them in this order. A Failure is a request that not even an empty cache has room for.
        """
        decided: list[Start | Failure] = []
        while self._free:
            decided += self._look_ahead()
            chosen = self._choose()
            if chosen is None:
                break
            decided.append(self._settle(chosen))
        return decided

    def _settle(self, chosen: _Choice) -> Start | Failure:
        """Take the chosen one from the queue and give it its place."""
        waiting = self._queue[chosen.number]
        del self._queue[chosen.number]
        try:
            row = waiting.row or self._start(waiting.request)
        except RecordError as error:
            return Failure(waiting.request.index, str(error), "RecordError")
        self._free.remove(chosen.target)
        place = self.places[chosen.target]
        place.row, place.group = row, waiting.group
        row.place, row.computed = chosen.target, chosen.tokens
        if not row.written:
            row.cached = chosen.tokens
        self._latest = chosen.target
        return Start(row, chosen.donor, chosen.tokens)

    def _needs(self, waiting: WaitingRequest) -> int:
        return len(waiting.tokens) + self._step

    def _look_ahead(self) -> list[Failure]:
        """Fill an empty queue with the requests that are there; block for one only while no row is under way.

        Return those that cannot be answered.
        """
        refused: list[Failure] = []
        while not self._queue:
            fresh = self._requests.take(max(self._lookahead, len(self._free)), wait=not self.rows())
            if not fresh:
                break
            for start in range(0, len(fresh), self._lookahead):
                ahead = [WaitingRequest(request) for request in fresh[start : start + self._lookahead]]
                refusals = [(waiting, self._refusal(waiting)) for waiting in ahead]
                refused += [failure for _, failure in refusals if failure is not None]
                self._queue.extend(self._grouped([waiting for waiting, failure in refusals if failure is None]))
        return refused

    def _grouped(self, ahead: Sequence[WaitingRequest]) -> Iterator[WaitingRequest]:
        """Yield those that share a prefix one after the other."""
        for indices in grouped([waiting.tokens for waiting in ahead]):
            group = next(self._groups)
            for index in indices:
                ahead[index].group = group
                yield ahead[index]

    def _refusal(self, waiting: WaitingRequest) -> Failure | None:
        """Return why a request cannot be answered, None where it can."""
        needs, index = self._needs(waiting), waiting.request.index
        if waiting.tokens and needs > self._room.slots(1):
            return Failure(index, self._room.why(needs))
        why = self._refusal_of(waiting.request) if waiting.tokens else "the prompt has no tokens"
        return Failure(index, why, "RecordError") if why else None

    def _choose(self) -> _Choice | None:
        """Return what starts next; None while nothing can.

        A request whose prefix is being computed right now waits for it, and one that has no room beside the others
        waits until they finish; others overtake both. A free place that holds the prefix of waiting requests is kept
        for them.
        """
        heads: dict[int, int] = {}  # of each group, the first in the queue
        for number, waiting in enumerate(islice(self._queue, SCAN)):
            heads.setdefault(waiting.group, number)
        spare = next((i for i in self._free if self.places[i].group not in heads), None)
        fits = self._room.slots(len(self.places))
        for group, number in heads.items():
            if self._needs(self._queue[number]) > fits:
                continue
            donor, now, coming = self._best_donor(self._queue[number])
            if coming >= now + WAIT:
                continue
            own = [i for i in self._free if self.places[i].group == group]
            target = donor if donor in own else own[0] if own else spare
            if target is not None:
                return _Choice(number, donor, target, now)
        if self.rows() or not heads:
            return None
        if self._needs(self._queue[0]) > fits:
            self._clear(self._room.rows(self._needs(self._queue[0])))
        donor, now, _ = self._best_donor(self._queue[0])
        return _Choice(0, donor, donor if donor in self._free else self._free[0], now)

    def _best_donor(self, waiting: WaitingRequest) -> tuple[int, int, int]:
        """Return the place that holds most of a request's tokens, how many, and how many some place will hold."""
        last = len(waiting.tokens) - 1  # the last token is always computed: its logits are wanted
        donor, best, most = self._latest, 0, 0
        for index, place in enumerate(self.places):
            if place.group == waiting.group or index == self._latest:
                offered = place.offers(waiting.tokens)
                now, coming = (self._usable(waiting.base, place.base, min(last, tokens)) for tokens in offered)
                most = max(most, coming)
                if now > best or (now == best and place.row is None):
                    donor, best = index, now
        return donor, best, most

    def _usable(self, base: int, other: int, tokens: int) -> int:
        """Return how many of the first `tokens` of a row that began with `other` tokens serve one of `base`."""
        for part in (tokens, min(tokens, other)):
            if self._agree(base, other, part):
                return part
        return 0


def new_row(request: Request) -> RequestState:
    """Return the row of a request."""
    noise = Noise(request.sampling.seed, request.id)
    return RequestState(request, list(request.token_ids), noise, time.perf_counter())
