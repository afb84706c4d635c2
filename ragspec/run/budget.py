"""A run that stops at its budgets: records are held back as soon as those under way may use the rest of one.

Records under way are counted with the most that they may take: in tokens, the prompts and the longest answers; in time,
what records took so far. All requests of a record are let through, or none. So a budget in tokens is kept, unless
answers have no limit; one in time is nearly kept.
Limit: one process; workers of a cluster are not held back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Self

from ragspec.config.sections import LONG_ANSWER
from ragspec.inputs.feed import Feed
from ragspec.outputs.ledger import Ledger
from ragspec.records import Request
from ragspec.run.price import Budget
from ragspec.stats import RunSummary, Spent

FIRST = 16  # records before it is known how long one takes


class BudgetGate:
    """What is left of budgets, given what earlier runs of the output used.

    Args:
        budgets: Each in seconds or tokens.
        ledger: What the output has already.
        spent: Seconds of earlier runs.
        clock: Seconds, for tests.

    Attributes:
        why: Which budget ended the run, and how; "" until then.
    """

    def __init__(
        self,
        budgets: Sequence[Budget],
        ledger: Ledger,
        spent: Spent,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._budgets = budgets
        self._tokens = ledger.prompt_tokens + ledger.output_tokens
        self._seconds = spent.load_s + spent.warmup_s + spent.generate_s
        self._clock = clock
        self._began = clock()
        self._first: float | None = None  # when the first record was let through
        self._admitted = 0  # records
        self._finished: Callable[[], int] = lambda: 0
        self._prompt_tokens = 0
        self._longest = 0
        self.why = ""

    @property
    def stopped(self) -> bool:
        """Return whether no more records are let through."""
        return bool(self.why)

    def watch(
        self, summary: RunSummary, records: Feed[list[Request]], finished: Callable[[], int]
    ) -> Feed[list[Request]]:
        """Return the records for which there is budget.

        records: the requests of each. finished: how many of those records have an outcome.
        """
        self._finished = finished
        return Feed(_Held(self, records, summary))

    def admits(self, requests: Sequence[Request], summary: RunSummary, *, waiting: bool) -> bool | None:
        """Return whether a record may be answered; None if that depends on those under way.

        waiting: the runner has nothing else to do.
        """
        for budget in self._budgets:
            if self._left(budget, summary) <= 0:
                self.why = f"--budget {budget.text} is spent" if self._admitted else self._spent_before(budget)
                return False
        done = self._finished()
        under_way = self._admitted - done
        over = next((each for each in self._budgets if not self._fits(each, requests, summary, done, under_way)), None)
        if over is None:
            self._first = self._first if self._first is not None else self._clock()
            self._admitted += 1
            self._prompt_tokens += _prompt_tokens(requests)
            self._longest = max(self._longest, _longest(requests))
            return True
        if under_way and not waiting:
            return None
        left = self._left(over, summary)
        rest = f"{left:,.0f} tokens" if over.tokens is not None else f"{left:,.0f} s"
        beside = ", beside those under way" if under_way else ""
        self.why = f"--budget {over.text}: the next record does not fit in the {rest} left{beside}"
        return False

    def _left(self, budget: Budget, summary: RunSummary) -> float:
        """Return the tokens or seconds of a budget that no finished record took."""
        if budget.tokens is not None:
            return budget.tokens - self._tokens - summary.prompt_tokens - summary.output_tokens
        assert budget.seconds is not None
        return budget.seconds - self._seconds - (self._clock() - self._began)

    def _fits(
        self, budget: Budget, requests: Sequence[Request], summary: RunSummary, done: int, under_way: int
    ) -> bool:
        if budget.tokens is not None:
            most = self._tokens + self._prompt_tokens + summary.output_tokens + under_way * self._longest
            return most + _prompt_tokens(requests) + _longest(requests) <= budget.tokens
        if not done or self._first is None:
            return self._admitted < FIRST
        return (under_way + 1) * (self._clock() - self._first) / done <= self._left(budget, summary)

    def _spent_before(self, budget: Budget) -> str:
        used = f"{self._tokens:,} tokens" if budget.tokens is not None else f"{self._seconds:,.0f} s"
        return f"--budget {budget.text} was spent before: the output took {used} so far"


def _prompt_tokens(requests: Sequence[Request]) -> int:
    """Return the tokens of a record's prompts; several answers to one share its tokens."""
    return sum(map(len, {id(request.token_ids): request.token_ids for request in requests}.values()))


def _longest(requests: Sequence[Request]) -> int:
    """Return the most tokens that a record's answers may have."""
    return sum(min(each.sampling.max_new_tokens, max(LONG_ANSWER, len(each.token_ids))) for each in requests)


class _Held:
    """Records as a Pollable (feed.py), as far as a budget lets them through."""

    def __init__(self, gate: BudgetGate, records: Feed[list[Request]], summary: RunSummary) -> None:
        self._gate = gate
        self._records = records
        self._summary = summary

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Request]:
        requests = next(self._records)
        if self._gate.stopped or not self._gate.admits(requests, self._summary, waiting=True):
            raise StopIteration
        return requests

    def poll(self) -> list[Request] | None:
        """Return the next record, None if it has to wait for those under way."""
        if self._gate.stopped:
            raise StopIteration
        requests = self._records.poll()
        if requests is None:
            return None
        admitted = self._gate.admits(requests, self._summary, waiting=False)
        if admitted is None:
            self._records.put_back([requests])
            return None
        if not admitted:
            raise StopIteration
        return requests

    def close(self) -> None:
        """Close the source."""
        self._records.close()
