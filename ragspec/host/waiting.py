"""How OpenMP's threads wait for each other: spinning while this process has the cores, asleep while others want them.

A thread that waits at a barrier spins for milliseconds, which is fastest alone. Beside another busy process it spins
for a thread that is not running, on the core that this thread needs. libgomp spins briefly as soon as there are more
threads than cores, counting those of every thread pool, so idle pools are all it takes to change how they wait. They
belong to threads that do nothing else, and end with them.

    >>> waiting = Waiting()
    >>> with waiting:  # a step
    ...     pass

Limits: Linux and libgomp, as in torch's wheels; elsewhere nothing changes. Processes are watched, not threads of this
process beside OpenMP's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

INTERVAL_S = 0.25  # between looks at what else runs
SLACK = 0.2  # cores that others may use unnoticed: the system's own work
MOST_POOLS = 8
STAT = Path("/proc/stat")
IDLE = (3, 4)  # places of idle and iowait among a line's counters
GUESTS = 8  # the counters from here on are parts of earlier ones


class Waiting:
    """Adapts how OpenMP's threads wait while they compute. used: returns the cores that other processes used lately.

    Attributes:
        brief: Whether they wait asleep now.
    """

    def __init__(self, used: Callable[[], float | None] | None = None) -> None:
        self.brief = False
        self._used = used or OtherProcesses().used
        self._looked = self._left = -INTERVAL_S
        self._end = threading.Event()

    def __del__(self) -> None:
        self._end.set()

    def __enter__(self) -> None:
        now = time.monotonic()
        if now - self._left >= INTERVAL_S:  # what ran while nothing was computed here does not count
            self._used()
            self._looked = now

    def __exit__(self, *raised: object) -> None:
        self._left = time.monotonic()
        if self._left - self._looked < INTERVAL_S:
            return
        self._looked = self._left
        used = self._used()
        if used is None:
            return
        import torch

        threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        crowded = threads > 1 and used > cores - threads + SLACK
        if crowded and not self.brief:
            self._hold(min(MOST_POOLS, -(-(cores - threads + 1) // (threads - 1))))
        elif not crowded:
            self._end.set()
        self.brief = crowded

    def _hold(self, pools: int) -> None:
        """Keep this many more pools of torch's threads, so that there are more threads than cores."""
        self._end = threading.Event()
        for _ in range(pools):
            threading.Thread(target=_have_pool, args=(self._end,), name="ragspec-waiting", daemon=True).start()


def _have_pool(end: threading.Event) -> None:
    import torch

    torch.zeros(1 << 20).add_(1)  # a thread's first parallel operation makes its pool, which lives as long as it
    end.wait()


class OtherProcesses:
    """What other processes use of the cores that this one may use."""

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None

    def used(self) -> float | None:
        """Return how many cores they have used since the last call; None at first, or if the system does not say."""
        try:
            busy = busy_s(STAT.read_text())
        except OSError:
            return None
        times = os.times()
        now = (time.monotonic(), busy, times.user + times.system)
        last, self._last = self._last, now
        if last is None:
            return None
        passed, all_of_it, own = (after - before for after, before in zip(now, last, strict=True))
        return max(0.0, all_of_it - own) / passed if passed else None


def busy_s(stat: str) -> float:
    """Return the seconds that this process's cores have worked, by the content of /proc/stat."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in stat.splitlines() if line.startswith("cpu")]
    ticks = [
        sum(int(ticks) for place, ticks in enumerate(line[1 : 1 + GUESTS]) if place not in IDLE)
        for line in lines
        if line[0] in mine
    ]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")
