"""How far a run has come, how fast it is now, and how long it will take: a line of text, or a JSON object.

    >>> pace = Pace(); pace.progress(summary, total=5000, now=60.0).text()
    '1,240/5,000, 310 tokens/s, 1:52 left, 3 failed'

Speeds are those of the last minutes, not of the whole run, so that a run that stands still is seen to. Limit: the time
left is unknown until two looks have seen records finish, or one if the run tells how long it has been answering.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ragspec.stats import RunSummary

WINDOW_S = 120.0  # the time whose speed is told
STILL_S, STILL = 60.0, 5  # a run stands still after so many seconds, and so many times what a record took so far
LOADING, WARMING_UP, ANSWERING = "loading", "warming up", "answering"


class Look(NamedTuple):
    """What a run had done at a time. done: records with an answer or an error line of this run."""

    now: float
    done: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come.

    elapsed_s: of the run; phase_s: of its phase. skipped: finished by earlier runs. total: the input's records, None if
    unknown. still_s: seconds without a finished record, if that is long for this run; 0 otherwise. workers: those
    alive, and all. doing: the phase in more words.
    """

    phase: str
    elapsed_s: float
    phase_s: float
    records: int
    failed: int
    skipped: int
    total: int | None
    output_tokens: int
    tokens_per_s: float | None
    left_s: float | None
    still_s: float
    workers: tuple[int, int] | None
    doing: str = ""

    @property
    def finished(self) -> int:
        """Return how many records of the input have a line."""
        return self.records + self.failed + self.skipped

    def text(self) -> str:
        """Return it as a line."""
        parts = [f"{self.finished:,}" + (f"/{self.total:,}" if self.total is not None else " records")]
        if self.phase != ANSWERING:
            parts.append(f"{self.doing or self.phase} for {clock(self.phase_s)}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.still_s:
            parts.append(f"none finished for {clock(self.still_s)}")
        elif self.left_s is not None:
            parts.append(f"{clock(self.left_s)} left")
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        if self.workers is not None and self.workers[0] < self.workers[1]:
            parts.append(f"{self.workers[0]} of {self.workers[1]} workers")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return it as an object; what is unknown is absent."""
        found: dict[str, Any] = {
            "phase": self.phase,
            "elapsed_s": round(self.elapsed_s, 1),
            "records": self.records,
            "failed": self.failed,
            "skipped": self.skipped,
            "output_tokens": self.output_tokens,
        }
        maybe = {"total": self.total, "tokens_per_s": self.tokens_per_s, "left_s": self.left_s}
        found |= {name: round(value, 1) for name, value in maybe.items() if value is not None}
        if self.workers is not None:
            found |= {"workers": self.workers[1], "workers_alive": self.workers[0]}
        return found


class Pace:
    """Looks at a run from time to time, and tells its speed between the looks of the last minutes."""

    def __init__(self, started: float = 0.0) -> None:
        self._started = started
        self._looks: deque[Look] = deque()
        self._moved_at = started
        self._phase, self._phase_began = LOADING, started

    def progress(self, summary: RunSummary, total: int | None, now: float) -> Progress:
        """Return how far the run has come. now: seconds, of the clock that `started` is of."""
        done = summary.records + summary.failed
        phase = ANSWERING if done else WARMING_UP if summary.load_s else LOADING
        last = self._looks[-1] if self._looks else None
        if phase != self._phase:
            self._phase, self._phase_began = phase, now
            self._looks.clear()  # loading and warming up are no part of the speed
            if summary.generate_s:
                self._looks.append(Look(now - summary.generate_s, 0, 0))
        if last is None or done > last.done:
            self._moved_at = now
        self._looks.append(Look(now, done, summary.output_tokens))
        while len(self._looks) > 2 and self._looks[1].now <= now - WINDOW_S:
            self._looks.popleft()
        records_per_s, tokens_per_s = self._speeds() if done else (None, None)
        left = None if total is None else max(0, total - done - summary.skipped)
        workers = summary.workers
        return Progress(
            phase=phase,
            elapsed_s=now - self._started,
            phase_s=now - self._phase_began,
            records=summary.records,
            failed=summary.failed,
            skipped=summary.skipped,
            total=total,
            output_tokens=summary.output_tokens,
            tokens_per_s=tokens_per_s,
            left_s=left / records_per_s if left is not None and records_per_s else None,
            still_s=self._still_s(done, now) if left != 0 else 0.0,
            workers=(sum(worker.alive for worker in workers), len(workers)) if workers else None,
        )

    def overall(self, summary: RunSummary, total: int | None, now: float) -> Progress:
        """Return how far a run had come when it ended, with its speed as a whole."""
        found = self.progress(summary, total, now)
        return replace(found, tokens_per_s=summary.tokens_per_s, left_s=None, still_s=0.0)

    def _still_s(self, done: int, now: float) -> float:
        still_s = now - self._moved_at
        usual_s = (self._moved_at - self._phase_began) / done if done else 0.0
        return still_s if done and still_s > max(STILL_S, STILL * usual_s) else 0.0

    def _speeds(self) -> tuple[float | None, float | None]:
        """Return records and tokens per second."""
        first, last = self._looks[0], self._looks[-1]
        if last.now <= first.now:
            return None, None
        passed = last.now - first.now
        return (last.done - first.done) / passed, (last.tokens - first.tokens) / passed


def clock(seconds: float) -> str:
    """Return seconds as people read them: 1:52, 3:04:10."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
