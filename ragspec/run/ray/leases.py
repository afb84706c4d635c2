"""Leases: which worker has which records, and which it may have next. Pure bookkeeping, without Ray.

>>> leases = Leases(); leases.add(task, group=b"passages"); leases.take("worker 1", 8)

Records of one group (the same passages) go to the same worker, whose cache and drafts know them. An idle worker takes
from another's group and shares that group from then on.

A record leased to a worker that dies becomes a suspect. Suspects are leased again, one at a time per worker; if that
worker dies too, the record is poisonous and the other records it had are not suspected. A silent worker may be alive,
so silence counts half.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from ragspec.run.answering import RecordTask

HOMES = 100_000  # groups whose workers are remembered
DEATH, SILENCE, POISONOUS = 2, 1, 4  # suspicion added by a death or a silence; the total that makes a record poisonous


class Leases:
    """Records until they are settled. waiting: records not leased. out: records leased. size: characters of both."""

    def __init__(self) -> None:
        self.waiting = 0
        self.out = 0
        self.size = 0
        self._ungrouped: deque[RecordTask] = deque()
        self._groups: OrderedDict[bytes, deque[RecordTask]] = OrderedDict()  # groups with waiting records
        self._homes: OrderedDict[bytes, set[str]] = OrderedDict()
        self._suspects: deque[RecordTask] = deque()
        self._suspicion: dict[int, int] = {}  # of suspects, waiting or leased, by line index
        self._leased: dict[str, dict[int, RecordTask]] = {}
        self._group_of: dict[int, bytes | None] = {}  # of all records not settled
        self._sizes: dict[int, int] = {}
        self._indexes: deque[int] = deque()  # line indexes as added; settled ones are dropped lazily

    @property
    def oldest(self) -> int | None:
        """The lowest line index that is not settled, None if all are."""
        while self._indexes and self._indexes[0] not in self._group_of:
            self._indexes.popleft()
        return self._indexes[0] if self._indexes else None

    def held(self, worker: str) -> int:
        """Return how many records a worker has."""
        return len(self._leased.get(worker, ()))

    def add(self, task: RecordTask, group: bytes | None, size: int = 0) -> None:
        """Add a record; call in ascending line order. group: what it shares with others, None if nothing."""
        self._group_of[task.index] = group
        self._sizes[task.index] = size
        self.size += size
        self._indexes.append(task.index)
        self._queue(task).append(task)
        self.waiting += 1

    def take(self, worker: str, most: int) -> list[RecordTask]:
        """Lease up to `most` records to a worker, oldest first as far as groups allow."""
        leased = self._leased.setdefault(worker, {})
        taken: list[RecordTask] = []
        if most > 0 and self._suspects and self._suspicion.keys().isdisjoint(leased):
            taken.append(self._suspects.popleft())
        own, free = list[bytes](), list[bytes]()
        for key in self._groups:
            homes = self._homes_of(key)
            if not homes or worker in homes:
                (own if homes else free).append(key)
        for key in own:
            taken += self._take_from(key, worker, most - len(taken))
        for key in free:
            while len(taken) < most and self._ungrouped and self._ungrouped[0].index < self._groups[key][0].index:
                taken.append(self._ungrouped.popleft())
            taken += self._take_from(key, worker, most - len(taken))
        taken += _first(self._ungrouped, most - len(taken))
        if not taken and most > 0 and self._groups:
            # half of the fullest group, so that neither worker runs dry soon
            key = max(self._groups, key=lambda key: len(self._groups[key]))
            taken += self._take_from(key, worker, min(most, (len(self._groups[key]) + 1) // 2))
        self.waiting -= len(taken)
        self.out += len(taken)
        leased.update((task.index, task) for task in taken)
        return taken

    def settle(self, worker: str, index: int) -> bool:
        """Settle a record; return False if that worker no longer had it."""
        if self._leased.get(worker, {}).pop(index, None) is None:
            return False
        self._forget(index)
        return True

    def give_back(self, worker: str, indexes: list[int]) -> None:
        """Put records of a worker back at the front of the queue."""
        leased = self._leased[worker]
        self._wait_again([leased.pop(index) for index in indexes if index in leased])

    def mark_dead(self, worker: str, suspicion: int) -> list[RecordTask]:
        """Requeue a dead worker's records; return those that are now poisonous, at most one.

        suspicion: DEATH, SILENCE, or 0 if its records cannot be the cause.
        """
        lost = self._leased.pop(worker, {})
        for homes in self._homes.values():
            homes.discard(worker)
        poisonous = []
        for index in list((self._suspicion.keys() & lost.keys()) or lost.keys()) if suspicion else ():
            self._suspicion[index] = self._suspicion.get(index, 0) + suspicion
            if self._suspicion[index] >= POISONOUS:
                poisonous.append(lost.pop(index))
                self._forget(index)
        self._wait_again(list(lost.values()))
        return poisonous

    def _forget(self, index: int) -> None:
        del self._group_of[index]
        self.size -= self._sizes.pop(index)
        self._suspicion.pop(index, None)
        self.out -= 1

    def _wait_again(self, lost: list[RecordTask]) -> None:
        for task in reversed(lost):
            (self._suspects if task.index in self._suspicion else self._queue(task)).appendleft(task)
        self.waiting += len(lost)
        self.out -= len(lost)

    def _queue(self, task: RecordTask) -> deque[RecordTask]:
        group = self._group_of[task.index]
        return self._ungrouped if group is None else self._groups.setdefault(group, deque())

    def _homes_of(self, group: bytes) -> set[str]:
        homes = self._homes.setdefault(group, set())
        self._homes.move_to_end(group)
        if len(self._homes) > HOMES:
            self._homes.popitem(last=False)
        return homes

    def _take_from(self, group: bytes, worker: str, most: int) -> list[RecordTask]:
        taken = _first(self._groups[group], most)
        if taken:
            self._homes_of(group).add(worker)
        if not self._groups[group]:
            del self._groups[group]
        return taken


def _first(queue: deque[RecordTask], most: int) -> list[RecordTask]:
    return [queue.popleft() for _ in range(min(most, len(queue)))]
