"""How many tokens to draft and to verify, per row and step, to maximise expected tokens per second. Pure.

    (rows + sum of chosen acceptances) / cost(rows + chosen)

Cumulative acceptance never rises along a chain, so the best M of all draft tokens are prefixes of chains: sort them and
try every M, since the cost curve is not convex (two tokens may cost as much as eight). A step with prefill is needed
anyway; there a draft token must pay for its own seconds at the rate of a step without prefill.
Prior art: SmartSpec (arXiv:2406.14066), AdaServe (arXiv:2501.12162).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain

import numpy as np

from ragspec.speculation.step_cost import Cost, costs_of

MARGIN = 0.5  # share of the average break-even acceptance, since costs have steps
LEAST_GAIN = 1.02  # over plain decoding; below it, do not speculate


def allocate(acceptances: Sequence[Sequence[float]], cost: Cost, reach: int, prefill_tokens: int = 0) -> list[int]:
    """Return how many tokens of each row's chain to verify.

    Args:
        acceptances: per row, the probability of each prefix of its chain.
        cost: seconds of a step.
        reach: slots of the longest row.
        prefill_tokens: prompt tokens in the same step.
    """
    counts = np.fromiter(map(len, acceptances), np.int64, len(acceptances))
    values = np.fromiter(chain.from_iterable(acceptances), np.float64, int(counts.sum()))
    lengths: list[int] = allocate_flat(values, counts, cost, reach, prefill_tokens).tolist()
    return lengths


def allocate_flat(
    acceptances: np.ndarray, counts: np.ndarray, cost: Cost, reach: int, prefill_tokens: int = 0
) -> np.ndarray:
    """Return allocate() for chains that follow each other in one array.

    acceptances: float64, one row's chain after the other. counts: tokens of each row's chain, int64.
    """
    rows = len(counts)
    ordered = np.sort(acceptances)[::-1]  # candidates, best first
    least_rate, token_s = break_even(rows, cost, reach, prefill_tokens)
    best, rate = _best(ordered, rows, cost, reach, least_rate)
    ends = np.cumsum(counts)
    if token_s is not None:
        chosen = acceptances > rate * token_s
    elif not best:
        return np.zeros(rows, np.int64)
    else:
        chosen = acceptances >= ordered[best - 1]
        if best < len(ordered) and ordered[best] == ordered[best - 1]:
            tied = np.flatnonzero(acceptances == ordered[best])
            row_of = np.searchsorted(ends, tied, "right")
            left = best - int((ordered > ordered[best]).sum())
            # the shallower first, so that every choice consists of prefixes
            chosen[tied[np.lexsort((row_of, tied - (ends - counts)[row_of]))[left:]]] = False
    before = np.zeros(len(chosen) + 1, np.int64)
    np.cumsum(chosen, out=before[1:])
    taken: np.ndarray = before[ends] - before[ends - counts]
    return taken


def break_even(rows: int, cost: Cost, reach: int, prefill_tokens: int) -> tuple[float, float | None]:
    """Return the tokens per second that drafts must exceed, and the seconds of a draft token beside prompts.

    The latter is None without prompts.
    """
    token_s = cost.marginal(prefill_tokens + rows, reach) if prefill_tokens else None
    return rows / cost(rows, rows, reach) * LEAST_GAIN, token_s


def least_acceptance(rows: int, cost: Cost, reach: int, prefill_tokens: int = 0) -> float:
    """Return a probability below which no draft token of such a step pays, so that chains can end there.

    Chosen low enough not to change allocate(): half of the break-even acceptance if costs had no steps.
    """
    plain_s = cost(rows, rows, reach)
    if prefill_tokens:
        token_s = cost.marginal(prefill_tokens + rows, reach)
    else:
        several = (max(1, rows // 2), rows, 2 * rows, 4 * rows, 8 * rows)
        token_s = min((cost(rows + tokens, rows, reach) - plain_s) / tokens for tokens in several)
    return MARGIN * rows / plain_s * token_s


def hopeless(rows: int, cost: Cost, reach: int, prefill_tokens: int) -> bool:
    """Return whether not even a certain draft token pays in a step with `prefill_tokens`.

    allocate() takes none there.
    """
    return least_acceptance(rows, cost, reach, prefill_tokens) >= MARGIN


def _best(values: np.ndarray, rows: int, cost: Cost, reach: int, least_rate: float) -> tuple[int, float]:
    """Return how many candidates, best first, maximise tokens per second, and that rate.

    Returns 0 and `least_rate` if none exceeds it.
    """
    if not len(values):
        return 0, least_rate
    expected = np.empty(len(values) + 1)
    expected[0], expected[1:] = rows, values
    expected.cumsum(out=expected)  # one by one, so that sums are those of a loop
    rates = expected[1:] / costs_of(cost, rows + 1, rows + len(values), rows, reach)
    best = int(rates.argmax())
    return (best + 1, float(rates[best])) if rates[best] > least_rate else (0, least_rate)


# -- confidence ------------------------------------------------------------------------------------

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)  # of the draft's own probability
PRIOR = 4.0  # observations that the draft's own probability is worth
MEMORY = 256.0  # observations after which older ones are halved
CONFIDENCE_RATE = 0.05  # weight of a new observation in the mean, in the long run
FIRST = 0.7  # initial mean


class Confidence:
    """How often a draft model's tokens are right, by its own probability, learnt during the run.

        >>> Confidence().chance(0.9)
        0.9

    mean: moving average over all tokens tried, given that those before them were right.
    """

    def __init__(self) -> None:
        self._hits = [0.0] * (len(EDGES) + 1)
        self._trials = [0.0] * (len(EDGES) + 1)
        self.mean = FIRST
        self.seen = 0

    def chance(self, sure: float) -> float:
        """Return the probability that a token is right. sure: the draft's own probability."""
        cell = bisect_right(EDGES, sure)
        return (self._hits[cell] + PRIOR * sure) / (self._trials[cell] + PRIOR)

    def observe(self, sure: float, right: bool) -> None:
        """Add a token compared with the target's, whose predecessors in the draft were right."""
        cell = bisect_right(EDGES, sure)
        if self._trials[cell] >= MEMORY:
            self._hits[cell] /= 2
            self._trials[cell] /= 2
        self._hits[cell] += right
        self._trials[cell] += 1
        self.seen += 1
        self.mean += max(CONFIDENCE_RATE, 1 / (self.seen + 1)) * (right - self.mean)


# -- draft length ----------------------------------------------------------------------------------

LONGEST = 12  # tokens
BLIND = 2  # tokens of a draft while its benefit is unknown: one shows whether it is right, the second what it costs
BLIND_OTHER = 4  # the same for a draft with other tokens, which may be fractions of the target's
LEARNING_RATE = 0.05
SHARE = 0.01  # of the time, for retrying drafts that did not pay
TRIED = 2  # rows that draft while the benefit is unknown, if their drafts have much to read first
NEAR = 8  # unread tokens up to which reading costs nothing noticeable, so that all such rows draft
KNOWN = 16  # compared tokens after which the benefit counts as known
PATIENCE = 48  # steps after which it counts as known in any case


class DraftLength:
    """How long and for which rows a draft model drafts. A forward serves all rows and must pay for all together.

        >>> length = DraftLength(cost, Confidence())
        >>> length.ratio(rows=4, reach=500)  # speed relative to no drafts, at the best length
        1.31

    Attributes:
        step_s: seconds of a forward of one token per row; None while unknown.
        fill_s: seconds per token that a draft has yet to read; None until many were read at once.

    Args:
        cost: seconds of a step of the target.
        confidence: how often drafted tokens are right.
        blind: BLIND or BLIND_OTHER.
    """

    def __init__(self, cost: Cost | None, confidence: Confidence, blind: int = BLIND) -> None:
        self.step_s: float | None = None
        self.fill_s: float | None = None
        self._cost = cost
        self._confidence = confidence
        self._blind = blind
        self._unknown_steps = 0  # steps while the benefit was unknown
        self._saved_up_s = 0.0  # for the next retry

    def stepped(self, seconds: float) -> None:
        """Record the seconds of a forward of one token per row."""
        self.step_s = seconds if self.step_s is None else self.step_s + LEARNING_RATE * (seconds - self.step_s)

    def filled(self, tokens: int, seconds: float) -> None:
        """Record the seconds of a forward over `tokens` that the draft had not read."""
        each = seconds / tokens
        self.fill_s = each if self.fill_s is None else self.fill_s + LEARNING_RATE * (each - self.fill_s)

    def ratio(self, rows: int, reach: int) -> float:
        """Return the speed of drafting at the best length relative to plain steps, as far as known."""
        if self._cost is None or self.step_s is None:
            return 1.0
        plain = rows / self._cost(rows, rows, reach)
        best, expected, acceptance = 0.0, 1.0, 1.0
        for length in range(1, LONGEST + 1):
            acceptance *= self._confidence.mean
            expected += acceptance
            seconds = self._cost(rows * (1 + length), rows, reach) + length * self.step_s
            best = max(best, expected * rows / seconds)
        return best / plain

    def chosen(self, missing: Sequence[int], left: Sequence[int], reach: int) -> list[int]:
        """Return the rows that draft: those for which it pays, or whose turn it is to find out.

        missing: per row, tokens that its draft has yet to read. left: per row, tokens that its answer may still have.
        """
        rows = len(missing)
        every = list(range(rows))
        if self._cost is None or not every:
            return every
        nearest = sorted(every, key=lambda row: missing[row])
        if not self._known:
            self._unknown_steps += 1
            return nearest[:TRIED] + [row for row in nearest[TRIED:] if missing[row] <= NEAR]
        ratio, step = self.ratio(rows, reach), self._cost(rows, rows, reach)
        fill_s = self.fill_s or 0.0  # None: nothing long was read yet
        if ratio >= LEAST_GAIN:
            saved = step / rows * (1 - 1 / ratio)  # seconds per answer token
            return [row for row in every if (missing[row] - 1) * fill_s <= left[row] * saved]
        self._saved_up_s += SHARE * step
        drafting = self._blind * (self.step_s or step) + self._cost(rows + self._blind, rows, reach) - step
        if self._saved_up_s < drafting + (missing[nearest[0]] - 1) * fill_s:
            return []
        self._saved_up_s = 0.0
        return nearest[:1]

    @property
    def _known(self) -> bool:
        """Return whether the cost and benefit of drafts are known."""
        return (self._confidence.seen >= KNOWN and self.step_s is not None) or self._unknown_steps >= PATIENCE

    def going_on(
        self, acceptances: Sequence[float], expected: float, drafted: int, depth: int, rows: int, reach: int
    ) -> list[int]:
        """Return the rows that draft another token: those that together gain more than it costs.

        Args:
            acceptances: per candidate row, the probability that its draft is right so far.
            expected: tokens that the step is expected to emit with the current drafts.
            drafted: tokens drafted so far, over all rows.
            depth: forwards so far.
            rows: rows of the step.
            reach: slots of the longest row.
        """
        every = list(range(len(acceptances)))
        if self._cost is None or not every:
            return every
        if self.step_s is None or not self._known:
            return every if depth < self._blind else []
        step = self._cost(rows + drafted, rows, reach)
        rate = expected / (step + (depth - 1) * self.step_s)
        more = self._cost(rows + drafted + len(acceptances), rows, reach) - step
        gains = [acceptance * self._confidence.mean for acceptance in acceptances]
        going = [row for row in every if gains[row] > rate * more / len(acceptances)]
        worth = sum(gains[row] for row in going)
        return going if worth > rate * (self.step_s + more * len(going) / len(acceptances)) else []
