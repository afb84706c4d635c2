"""A run that stops at its budget: requests are held back as soon as those under way may use the rest of it.

Requests under way are counted with the most that they may take: in tokens, the prompt and the longest answer; in time,
what records took so far. So a budget in tokens is kept, unless answers have no limit; one in time is nearly kept.
Limit: one process; workers of a cluster are not held back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from ragspec.config.sections import LONG_ANSWER
from ragspec.errors import ConfigError
from ragspec.inputs.feed import Feed
from ragspec.outputs.ledger import Ledger
from ragspec.records import Request
from ragspec.run.price import Budget
from ragspec.stats import RunSummary, Spent

FIRST = 16  # requests before it is known how long one takes


class BudgetGate:
    """What is left of a budget, given what earlier runs of the output used.

    Args:
        budget: In seconds or tokens.
        ledger: What the output has already.
        spent: Seconds of earlier runs.
        clock: Seconds, for tests.
    """

    def __init__(
        self, budget: Budget, ledger: Ledger, spent: Spent, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._budget = budget
        self._tokens = ledger.prompt_tokens + ledger.output_tokens
        self._seconds = spent.load_s + spent.warmup_s + spent.generate_s
        self._clock = clock
        self._began = clock()
        self._first: float | None = None  # when the first request was let through
        self._admitted = 0
        self._prompt_tokens = 0
        self._longest = 0
        self.stopped = False

    def watch(self, requests: Feed[Request], summary: RunSummary) -> Feed[Request]:
        """Return the requests for which there is budget. Raises ConfigError at the first if nothing is left."""
        return Feed(_Held(self, requests, summary))

    def admits(self, request: Request, summary: RunSummary, *, waiting: bool) -> bool | None:
        """Return whether a request may be answered; None if that depends on those under way.

        waiting: the runner has nothing else to do.
        """
        if self._used_up(summary):
            if not self._admitted:
                raise ConfigError(self._message())
            self.stopped = True
            return False
        under_way = max(0, self._admitted - summary.records - summary.failed)
        if self._fits(request, summary, under_way):
            self._first = self._first if self._first is not None else self._clock()
            self._admitted += 1
            self._prompt_tokens += len(request.token_ids)
            self._longest = max(self._longest, _longest(request))
            return True
        if under_way and not waiting:
            return None
        self.stopped = True
        return False

    def _used_up(self, summary: RunSummary) -> bool:
        if self._budget.tokens is not None:
            return self._tokens + summary.prompt_tokens + summary.output_tokens >= self._budget.tokens
        assert self._budget.seconds is not None
        return self._seconds + self._clock() - self._began >= self._budget.seconds

    def _fits(self, request: Request, summary: RunSummary, under_way: int) -> bool:
        if self._budget.tokens is not None:
            most = self._tokens + self._prompt_tokens + summary.output_tokens + under_way * self._longest
            return most + len(request.token_ids) + _longest(request) <= self._budget.tokens
        assert self._budget.seconds is not None
        done = summary.records + summary.failed
        if not done or self._first is None:
            return self._admitted < FIRST
        now = self._clock()
        left = self._budget.seconds - self._seconds - (now - self._began)
        return (under_way + 1) * (now - self._first) / done <= left

    def _message(self) -> str:
        used = f"{self._tokens:,} tokens" if self._budget.tokens is not None else f"{self._seconds:,.0f} s"
        return f"--budget {self._budget.text}: already spent; the output took {used} so far; give a larger one"


def _longest(request: Request) -> int:
    return min(request.sampling.max_new_tokens, max(LONG_ANSWER, len(request.token_ids)))


class _Held:
    """Requests as a Pollable (feed.py), as far as a budget lets them through."""

    def __init__(self, gate: BudgetGate, requests: Feed[Request], summary: RunSummary) -> None:
        self._gate = gate
        self._requests = requests
        self._summary = summary

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Request:
        request = next(self._requests)
        if self._gate.stopped or not self._gate.admits(request, self._summary, waiting=True):
            raise StopIteration
        return request

    def poll(self) -> Request | None:
        """Return the next request, None if it has to wait for those under way."""
        if self._gate.stopped:
            raise StopIteration
        request = self._requests.poll()
        if request is None:
            return None
        admitted = self._gate.admits(request, self._summary, waiting=False)
        if admitted is None:
            self._requests.put_back([request])
            return None
        if not admitted:
            raise StopIteration
        return request

    def close(self) -> None:
        """Close the source."""
        self._requests.close()
