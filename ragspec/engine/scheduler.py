"""The scheduler: which request gets which slot of the cache, with which prefix; and which rows share prefixes.

Requests are read ahead and grouped by prefix, and start from the longest prefix that another row has computed. Nothing
here touches the cache: a Start says what to copy.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from ragspec.engine.kv.budget import KvBudget
from ragspec.engine.kv.common_prefix import LEAST, PrefixIndex, grouped, keys_of, shared
from ragspec.engine.model.kv_splits import PrefixGroup
from ragspec.engine.request_state import CacheRow, RequestState, Start
from ragspec.engine.sampling import Noise
from ragspec.errors import RecordError
from ragspec.inputs.feed import Feed
from ragspec.records import Failure, Request

REMEMBERED = 1 << 14  # pairs of requests whose common prefix is cached


class PrefixGroups:
    """Finds rows of a step with a common prompt prefix, which then attend to it together (kv_splits.py).

    agree: whether the tokens of two rows may be shared (Frequencies.agree).
    """

    def __init__(self, agree: Callable[[int, int, int], bool]) -> None:
        self._agree = agree
        self._common: dict[tuple[int, int], int] = {}  # prefix length by the indices of two requests

    def among(self, rows: Sequence[RequestState]) -> list[PrefixGroup]:
        """Return disjoint groups of rows."""
        alike: dict[tuple[int, ...], list[RequestState]] = {}
        for row in rows:
            alike.setdefault(tuple(row.request.token_ids[:LEAST]), []).append(row)
        return [group for some in alike.values() if len(some) > 1 for group in self._groups(some)]

    def read(self, rows: Sequence[RequestState]) -> float:
        """Return the share of the rows' tokens that a step reads, if common prefixes are read once."""
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


# -- scheduler -------------------------------------------------------------------------------------
WAIT = 16  # a request waits if another row is about to compute this many more tokens of its prefix
FIRST = 4  # requests read before the first step, if others can be read while the device computes
DONORS = 8  # slots with a request's prefix that are compared
SCAN = 256  # waiting requests considered when choosing the next

Agree = Callable[[int, int, int], bool]


class WaitingRequest:
    """A request, or a preempted row, in the queue. Tokens are packed: thousands may wait. keys: as of PrefixIndex."""

    __slots__ = ("group", "keys", "request", "row", "tokens")

    def __init__(self, request: Request, group: int = -1, row: RequestState | None = None) -> None:
        self.request = request
        self.group = group  # common to requests with a common prefix
        self.row = row
        self.tokens = array("i", row.tokens if row else request.token_ids)
        self.keys = keys_of(self.tokens)

    @property
    def base(self) -> int:
        """The base with which its row starts (RequestState.base)."""
        return self.row.base if self.row else len(self.tokens)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The next request to start: its index in the queue, and the fields of its Start."""

    number: int
    donor: int
    target: int
    tokens: int


class Scheduler:
    """The queue and the slots.

    Args:
        requests: The input.
        places: Number of slots.
        lookahead: Requests read ahead.
        start: Makes the state of a request; may raise RecordError.
        room: Memory for the KV cache.
        step: Maximum growth of a row in one step, in tokens.
        agree: agree(base, other, tokens): whether rows with these bases compute the same for the first `tokens` tokens
            (Frequencies.agree).
        refusal: Returns why a request cannot be answered, or "".
        beside: Returns how many tokens a request may have beside others, whose tokens are given by slot; None where
            memory is divided evenly among the slots.
        prompts_only: Whether a request may start with the tokens of another's prompt, but not of its answer.
        reads_beside: Whether requests are read while the device computes; the first few are enough to begin with.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        places: int,
        lookahead: int,
        *,
        prompts_only: bool = False,
        reads_beside: bool = False,
        start: Callable[[Request], RequestState] | None = None,
        room: KvBudget | None = None,
        step: int = 1,
        agree: Agree | None = None,
        refusal: Callable[[Request], str] | None = None,
        beside: Callable[[Mapping[int, int]], int] | None = None,
    ) -> None:
        self._requests = Feed(requests)
        self._lookahead = lookahead
        self._start = start or new_row
        self._room = room or KvBudget()
        self._step = step
        self._agree = agree or (lambda base, other, tokens: True)
        self._prompts_only = prompts_only
        self._reads_beside = reads_beside
        self._beside = beside
        self._refusal_of = refusal or (lambda request: "")
        self._queue: deque[WaitingRequest] = deque()
        self._read: list[WaitingRequest] = []  # while the device computed, before the queue was empty
        self._groups = count()
        self._clear(places)

    def _clear(self, places: int) -> None:
        self.places = [CacheRow() for _ in range(places)]
        self._free = list(range(places))  # least recently used first
        self._index = PrefixIndex()
        self._rows: list[RequestState] | None = None  # under way; None if that has changed

    def rows(self) -> Sequence[RequestState]:
        """Return the rows under way, by slot."""
        if self._rows is None:
            self._rows = [place.row for place in self.places if place.row is not None]
        return self._rows

    def release(self, row: RequestState) -> None:
        """Free the slot of a finished row."""
        self.places[row.place].leave()
        self._rows = None
        self._free.append(row.place)

    def interrupt(self, places: int, first: RequestState | None = None) -> None:
        """Preempt all rows to the head of the queue, `first` before the others; continue with `places` empty slots."""
        rows = sorted(self.rows(), key=lambda row: (row is not first, row.started))
        self._clear(places)
        for row in reversed(rows):
            self._wait_first(row)

    def _wait_first(self, row: RequestState) -> None:
        """Let a row, which loses its slot, wait at the head of the queue."""
        row.place, row.computed = -1, 0
        self._queue.appendleft(WaitingRequest(row.request, next(self._groups), row))

    def preempt_youngest(self) -> tuple[int, RequestState]:
        """Move the row that started last to the head of the queue; return the slot that it had, and the row."""
        row = max(self.rows(), key=lambda row: row.started)
        number = row.place
        self._empty(number)
        self._free.append(number)
        self._wait_first(row)
        return number, row

    def forget_oldest(self) -> int | None:
        """Forget what the least recently used free slot holds; return it, None if all of them are empty."""
        found = next((number for number in self._free if self.places[number].left), None)
        if found is not None:
            self._empty(found)
        return found

    def _empty(self, number: int) -> None:
        """Forget what a slot holds."""
        self.places[number] = CacheRow()
        self._rows = None
        self._index.put(number, [])

    def widen(self, most: int) -> int:
        """Add slots, up to `most`, while every row could finish in them; return how many there are."""
        if len(self.places) >= most:
            return len(self.places)
        requests = [*(row.request for row in self.rows()), *(waiting.request for waiting in islice(self._queue, 1))]
        longest = max((request.most_tokens for request in requests), default=1)
        fit = most if self._beside else self._room.rows(longest)
        for _ in range(len(self.places), min(most, fit)):
            self._free.append(len(self.places))
            self.places.append(CacheRow())
        return len(self.places)

    def forget_beyond(self, slots: int) -> None:
        """Forget tokens that slots hold beyond the first `slots`."""
        for number, place in enumerate(self.places):
            if len(place.left) > slots:
                del place.left[slots:]
                self._index.put(number, keys_of(place.left))

    def coming(self) -> tuple[int, int]:
        """Return the longest prompt among rows and queue, and the most tokens that one of them may reach."""
        requests = [*(row.request for row in self.rows()), *(waiting.request for waiting in self._queue)]
        prompt = max((len(request.token_ids) for request in requests), default=0)
        return prompt, max((request.most_tokens for request in requests), default=0)

    def admit(self) -> list[Start | Failure]:
        """Assign free slots to waiting requests, each with the longest prefix that some slot holds.

        Start them in this order. A Failure is a request that does not fit even an empty cache.
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
        """Take the chosen request from the queue and give it its slot."""
        waiting = self._queue[chosen.number]
        del self._queue[chosen.number]
        try:
            row = waiting.row or self._start(waiting.request)
        except RecordError as error:
            return Failure(waiting.request.index, str(error), "RecordError")
        self._free.remove(chosen.target)
        place = self.places[chosen.target]
        place.row, place.group = row, waiting.group
        self._rows = None
        row.place, row.computed = chosen.target, chosen.tokens
        if not row.written:
            row.cached = chosen.tokens
        self._index.put(chosen.target, waiting.keys)
        return Start(row, chosen.donor, chosen.tokens)

    def _fits(self) -> int:
        """Return how many tokens one more row may have."""
        if self._beside is None:
            return self._room.slots(len(self.places))
        return self._beside({row.place: len(row.tokens) + self._step for row in self.rows()})

    def _needs(self, waiting: WaitingRequest) -> int:
        return len(waiting.tokens) + self._step

    def _look_ahead(self) -> list[Failure]:
        """Fill an empty queue with the requests that have arrived; block only if no row is under way.

        Return the requests that cannot be answered.
        """
        refused: list[Failure] = []
        while not self._queue:
            fresh, self._read = self._read, []
            if not self._reads_beside:
                fresh = self._take(max(self._lookahead, len(self._free)), wait=not self.rows())
            elif not fresh and not self.rows():
                fresh = self._take(FIRST, wait=True)
            if not fresh:
                break
            for start in range(0, len(fresh), self._lookahead):
                refusals = [(waiting, self._refusal(waiting)) for waiting in fresh[start : start + self._lookahead]]
                refused += [failure for _, failure in refusals if failure is not None]
                self._queue.extend(self._grouped([waiting for waiting, failure in refusals if failure is None]))
        return refused

    def read_ahead(self, until: Callable[[], bool]) -> None:
        """Read requests, of which one more takes a while, until it is time to stop or enough are read."""
        while self._reads_beside and len(self._read) < self._lookahead:
            fresh = self._take(1, wait=False)
            self._read += fresh
            if not fresh or until():
                return

    def _take(self, most: int, *, wait: bool) -> list[WaitingRequest]:
        """Read requests that have arrived. wait: block until there is one."""
        return [WaitingRequest(request) for request in self._requests.take(most, wait=wait)]

    def _grouped(self, ahead: Sequence[WaitingRequest]) -> Iterator[WaitingRequest]:
        """Yield requests with a common prefix one after the other."""
        for indices in grouped([waiting.tokens for waiting in ahead]):
            group = next(self._groups)
            for index in indices:
                ahead[index].group = group
                yield ahead[index]

    def _refusal(self, waiting: WaitingRequest) -> Failure | None:
        """Return why a request cannot be answered, None if it can."""
        needs, index = self._needs(waiting), waiting.request.index
        if waiting.tokens and needs > self._room.slots(1):
            return Failure(index, self._room.why(needs))
        why = self._refusal_of(waiting.request) if waiting.tokens else "the prompt has no tokens"
        return Failure(index, why, "RecordError") if why else None

    def _choose(self) -> _Choice | None:
        """Return the next request to start, None if none can.

        A request whose prefix is being computed waits for it, and one without room beside the others waits for them to
        finish; later requests overtake both. A free slot with the prefix of waiting requests is kept for them.
        """
        heads: dict[int, int] = {}  # the first request of each group in the queue
        for number, waiting in enumerate(islice(self._queue, SCAN)):
            heads.setdefault(waiting.group, number)
        spare = next((i for i in self._free if self.places[i].group not in heads), None)
        fits = self._fits()
        for group, number in heads.items():
            if self._needs(self._queue[number]) > fits:
                if self._beside and self._queue[number].row is not None:
                    break  # it was preempted: others would take the blocks that it waits for
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
        if self._needs(self._queue[0]) > fits and self._beside is None:
            self._clear(self._room.rows(self._needs(self._queue[0])))
        donor, now, _ = self._best_donor(self._queue[0])
        return _Choice(0, donor, donor if donor in self._free else self._free[0], now)

    def _best_donor(self, waiting: WaitingRequest) -> tuple[int, int, int]:
        """Return the slot with the longest prefix of a request, its length, and the longest that any slot will have.

        Of slots that begin alike to within a few tokens, the first few that hold them are enough.
        """
        last = len(waiting.tokens) - 1  # the last token is always computed, since its logits are needed
        donor, best, longest, enough = 0, 0, 0, DONORS
        slots, least = self._index.nearest(waiting.keys)
        for index in slots:
            place = self.places[index]
            most = min(place.base, len(waiting.request.token_ids)) if self._prompts_only else last
            offered = [min(tokens, most) for tokens in place.offers(waiting.tokens)]
            now, coming = (self._usable(waiting.base, place.base, min(last, tokens)) for tokens in offered)
            longest = max(longest, coming)
            if now > best or (now == best and place.row is None):
                donor, best = index, now
            enough -= now >= min(least, most, last)
            if not enough:
                break
        return donor, best, longest

    def _usable(self, base: int, other: int, tokens: int) -> int:
        """Return how many of the first `tokens` of a row with base `other` can be used by one of `base`."""
        for part in (tokens, min(tokens, other)):
            if self._agree(base, other, part):
                return part
        return 0


def new_row(request: Request) -> RequestState:
    """Return the initial state of a request."""
    noise = Noise(request.sampling.seed, request.id)
    return RequestState(request, list(request.token_ids), noise, time.perf_counter())
