"""Which worker has which records, and which it may have next: pure bookkeeping, without Ray.

>>> leases = Leases(); leases.add(asked, group=b"passages"); leases.take("worker 1", 8)

Records of one group (the same passages) go to the same worker, whose cache and drafts know them. A worker that would
have nothing to do takes from another's group, and is a home of that group from then on.

A record that was with a worker when it died is a suspect. It is leased again, one suspect at a time to a worker; if
that one dies too, the suspect is guilty, and what else died with it is not suspected. A worker that fell silent may be
well, so silence weighs half as much.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from ragspec.run.answering import RecordTask

HOMES = 100_000  # groups whose workers are remembered
DEATH, SILENCE, POISONOUS = 2, 1, 4  # how suspicious records are, and when they are guilty


class Leases:
    """Records until they are settled. waiting: how many no worker has. out: how many one has. size: of all."""

    def __init__(self) -> None:
        self.waiting = 0
        self.out = 0
        self.size = 0
        self._loose: deque[RecordTask] = deque()  # of no group
        self._groups: OrderedDict[bytes, deque[RecordTask]] = OrderedDict()  # those with records waiting
        self._homes: OrderedDict[bytes, set[str]] = OrderedDict()
        self._suspects: deque[RecordTask] = deque()
        self._suspicion: dict[int, int] = {}  # by the line of a suspect, wherever it is
        self._leased: dict[str, dict[int, RecordTask]] = {}
        self._group_of: dict[int, bytes | None] = {}  # of all that is not settled
        self._sizes: dict[int, int] = {}
        self._lines: deque[int] = deque()  # as they were added

    @property
    def oldest(self) -> int | None:
        """The first line that is not settled, None if all are."""
        while self._lines and self._lines[0] not in self._group_of:
            self._lines.popleft()
        return self._lines[0] if self._lines else None

    def held(self, worker: str) -> int:
        """Return how many records a worker has."""
        return len(self._leased.get(worker, ()))

    def add(self, asked: RecordTask, group: bytes | None, size: int = 0) -> None:
        """Take in a record, lines in ascending order. group: what it shares with others; None: nothing."""
        self._group_of[asked.index] = group
        self._sizes[asked.index] = size
        self.size += size
        self._lines.append(asked.index)
        self._queue(asked).append(asked)
        self.waiting += 1

    def take(self, worker: str, most: int) -> list[RecordTask]:
        """Lease up to `most` records to a worker, the oldest first as far as groups allow."""
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
            taken += self._from(key, worker, most - len(taken))
        for key in free:
            while len(taken) < most and self._loose and self._loose[0].index < self._groups[key][0].index:
                taken.append(self._loose.popleft())
            taken += self._from(key, worker, most - len(taken))
        taken += _first(self._loose, most - len(taken))
        if not taken and most > 0 and self._groups:
            # half of the others' fullest group, so that neither is soon idle
            key = max(self._groups, key=lambda key: len(self._groups[key]))
            taken += self._from(key, worker, min(most, (len(self._groups[key]) + 1) // 2))
        self.waiting -= len(taken)
        self.out += len(taken)
        leased.update((asked.index, asked) for asked in taken)
        return taken

    def settle(self, worker: str, index: int) -> bool:
        """Take note that a line is there; return False if that worker did not have it (any more)."""
        if self._leased.get(worker, {}).pop(index, None) is None:
            return False
        self._forget(index)
        return True

    def give_back(self, worker: str, indexes: list[int]) -> None:
        """Let records of a worker wait again, before all others."""
        leased = self._leased[worker]
        self._wait_again([leased.pop(index) for index in indexes if index in leased])

    def mark_dead(self, worker: str, suspicion: int) -> list[RecordTask]:
        """Let a dead worker's records wait again; return the one that is guilty now, if any.

        suspicion: DEATH, SILENCE, or 0 if none of them may be the reason.
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
        for asked in reversed(lost):
            (self._suspects if asked.index in self._suspicion else self._queue(asked)).appendleft(asked)
        self.waiting += len(lost)
        self.out -= len(lost)

    def _queue(self, asked: RecordTask) -> deque[RecordTask]:
        group = self._group_of[asked.index]
        return self._loose if group is None else self._groups.setdefault(group, deque())

    def _homes_of(self, group: bytes) -> set[str]:
        homes = self._homes.setdefault(group, set())
        self._homes.move_to_end(group)
        if len(self._homes) > HOMES:
            self._homes.popitem(last=False)
        return homes

    def _from(self, group: bytes, worker: str, most: int) -> list[RecordTask]:
        taken = _first(self._groups[group], most)
        if taken:
            self._homes_of(group).add(worker)
        if not self._groups[group]:
            del self._groups[group]
        return taken


def _first(queue: deque[RecordTask], most: int) -> list[RecordTask]:
    return [queue.popleft() for _ in range(min(most, len(queue)))]
