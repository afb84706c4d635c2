"""How many draft tokens to verify, per row and step: those that raise the expected tokens per second. Pure.

    (rows + sum of chosen survivals) / cost(rows + chosen)

Survival never rises along a chain, so the best M of all draft tokens are prefixes of chains: sort them and try every M,
because the cost curve is not convex (two tokens may cost as much as eight). A step that computes prompts has to be paid
for anyway; there a draft token must earn its own seconds at the rate of a step without prompts.
Prior art: SmartSpec (arXiv:2406.14066), AdaServe (arXiv:2501.12162).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ragspec.speculation.step_cost import Cost

MARGIN = 0.5  # of what a draft token has to survive with on average: costs do have steps
LEAST_GAIN = 1.02  # over plain decoding; below it, not speculating is as good


def allocate(survivals: Sequence[Sequence[float]], cost: Cost, reach: int, prefill_tokens: int = 0) -> list[int]:
    """Return how many tokens of each row's chain to verify.

    survivals: per row, the probability of each prefix of its chain. reach: slots of the longest row. besides: tokens
    of the step that are not these rows' (prefill).
    """
    rows = len(survivals)
    candidates = [(-value, depth, row) for row, chain in enumerate(survivals) for depth, value in enumerate(chain)]
    candidates.sort()  # of equals the shallower first, so that each choice is prefixes of chains
    plain = rows / cost(rows, rows, reach)
    taken = [0] * rows
    best, rate = _best(candidates, rows, cost, reach, plain * LEAST_GAIN)
    if prefill_tokens:
        least = rate * cost.marginal(prefill_tokens + rows, reach)
        best = sum(-value > least for value, _, _ in candidates)
    for _, _, row in candidates[:best]:
        taken[row] += 1
    return taken


def least_acceptance(rows: int, cost: Cost, reach: int, prefill_tokens: int = 0) -> float:
    """Return a probability below which no draft token of such a step pays: chains need not be followed further.

    As of allocate(), whose choice it should not change: half of what a token would have to survive with if costs had no
    steps.
    """
    plain_s = cost(rows, rows, reach)
    if prefill_tokens:
        token_s = cost.marginal(prefill_tokens + rows, reach)
    else:
        several = (max(1, rows // 2), rows, 2 * rows, 4 * rows, 8 * rows)
        token_s = min((cost(rows + tokens, rows, reach) - plain_s) / tokens for tokens in several)
    return MARGIN * rows / plain_s * token_s


def hopeless(rows: int, cost: Cost, reach: int, prefill_tokens: int) -> bool:
    """Return whether not even a certain draft token pays in a step that also computes `besides` tokens of prompts.

    allocate() takes none there.
    """
    return least_acceptance(rows, cost, reach, prefill_tokens) >= MARGIN


def _best(
    candidates: Sequence[tuple[float, int, int]], rows: int, cost: Cost, reach: int, least_rate: float
) -> tuple[int, float]:
    """Return how many of the candidates, best first, make the most tokens per second, and that rate.

    0 and `least_rate` where none makes more.
    """
    best, best_rate = 0, least_rate
    expected = float(rows)
    for chosen, (value, _, _) in enumerate(candidates, 1):
        expected -= value
        rate = expected / cost(rows + chosen, rows, reach)
        if rate > best_rate:
            best, best_rate = chosen, rate
    return best, best_rate


# -- how often a draft model's tokens are right, by how sure it was of them: learnt while the run goes on. Pur --------
#
# >>> Confidence().chance(0.9)
# 0.9


EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)  # of the draft's own probability
PRIOR = 4.0  # observations that a draft's own word counts for
MEMORY = 256.0  # observations, after which the oldest count half
CONFIDENCE_RATE = 0.05  # weight of a new observation in the mean, once there are many
FIRST = 0.7  # of all tokens, before any is known


class Confidence:
    """mean: the chance of any token that is tried, given that those before it were right; it follows the latest."""

    def __init__(self) -> None:
        self._hits = [0.0] * (len(EDGES) + 1)
        self._trials = [0.0] * (len(EDGES) + 1)
        self.mean = FIRST
        self.seen = 0

    def chance(self, sure: float) -> float:
        """Return how likely a token is right. sure: the probability that the draft gave it."""
        cell = bisect_right(EDGES, sure)
        return (self._hits[cell] + PRIOR * sure) / (self._trials[cell] + PRIOR)

    def observe(self, sure: float, right: bool) -> None:
        """Learn from a token that has been compared with what the target wrote, those before it being right."""
        cell = bisect_right(EDGES, sure)
        if self._trials[cell] >= MEMORY:
            self._hits[cell] /= 2
            self._trials[cell] /= 2
        self._hits[cell] += right
        self._trials[cell] += 1
        self.seen += 1
        self.mean += max(CONFIDENCE_RATE, 1 / (self.seen + 1)) * (right - self.mean)


# -- how long to draft with a model, whose every token takes a forward of its own, and for which rows. Pure -----------
#
#     >>> pace = Pace(cost)
#     >>> pace.ratio(rows=4, reach=500)  # how many times as fast as without drafts, at best
#     1.31
#
# A forward of the draft serves all rows at once and is paid for by their chances together; the target's step that
# verifies is paid for by `cost`, as everywhere (draft_length.py).


LONGEST = 12
BLIND = 2  # tokens of a draft while it is not known whether it pays: the first shows that, the second what one costs
BLIND_OTHER = 4  # of a draft with other tokens, of which one may be a fraction of the target's
LEARNING_RATE = 0.05
SHARE = 0.01  # of the time, that may be spent on trying again drafts that did not pay
TRIED = 2  # rows that draft meanwhile, of those whose draft has to be read first
NEAR = 8  # tokens: rows with no more to be read cost a forward nothing to speak of, and all of them draft
KNOWN = 16  # tokens that were compared, after which it is known
PATIENCE = 48  # steps after which it is taken for known


class DraftLength:
    """One draft model in one run. step_s: of a forward of one token for each row; None before it is known.

    fill_s: of one token of what a row's draft has yet to read; None where nothing long was read. blind: BLIND or
    BLIND_OTHER.
    """

    def __init__(self, cost: Cost | None, confidence: Confidence, blind: int = BLIND) -> None:
        self.step_s: float | None = None
        self.fill_s: float | None = None
        self._cost = cost
        self._confidence = confidence
        self._blind = blind
        self._tries = 0  # steps in which it was not known
        self._saved_up_s = 0.0  # for the next try

    def stepped(self, seconds: float) -> None:
        """A forward of one token for each row took `seconds`."""
        self.step_s = seconds if self.step_s is None else self.step_s + LEARNING_RATE * (seconds - self.step_s)

    def filled(self, tokens: int, seconds: float) -> None:
        """A forward of `tokens` that the draft had not read took `seconds`."""
        each = seconds / tokens
        self.fill_s = each if self.fill_s is None else self.fill_s + LEARNING_RATE * (each - self.fill_s)

    def ratio(self, rows: int, reach: int) -> float:
        """Return how many times as fast as plain ones steps with drafts of the best length are, by what is known."""
        if self._cost is None or self.step_s is None:
            return 1.0
        plain = rows / self._cost(rows, rows, reach)
        best, expected, survival = 0.0, 1.0, 1.0
        for length in range(1, LONGEST + 1):
            survival *= self._confidence.mean
            expected += survival
            seconds = self._cost(rows * (1 + length), rows, reach) + length * self.step_s
            best = max(best, expected * rows / seconds)
        return best / plain

    def chosen(self, missing: Sequence[int], left: Sequence[int], reach: int) -> list[int]:
        """Return the rows for which drafts pay, or whose turn it is to show whether they do.

        missing: per row, tokens that its draft has yet to read. left: tokens that its answer may still have.
        """
        rows = len(missing)
        every = list(range(rows))
        if self._cost is None or not every:
            return every
        nearest = sorted(every, key=lambda row: missing[row])
        if not self._known:
            self._tries += 1
            return nearest[:TRIED] + [row for row in nearest[TRIED:] if missing[row] <= NEAR]
        ratio, step = self.ratio(rows, reach), self._cost(rows, rows, reach)
        fill_s = self.fill_s or 0.0  # nothing long was read yet
        if ratio >= LEAST_GAIN:
            saved = step / rows * (1 - 1 / ratio)  # seconds, per token of an answer
            return [row for row in every if (missing[row] - 1) * fill_s <= left[row] * saved]
        self._saved_up_s += SHARE * step
        drafting = self._blind * (self.step_s or step) + self._cost(rows + self._blind, rows, reach) - step
        if self._saved_up_s < drafting + (missing[nearest[0]] - 1) * fill_s:
            return []
        self._saved_up_s = 0.0
        return nearest[:1]

    @property
    def _known(self) -> bool:
        """Whether it is known what drafts cost and bring."""
        return (self._confidence.seen >= KNOWN and self.step_s is not None) or self._tries >= PATIENCE

    def going_on(
        self, survivals: Sequence[float], expected: float, drafted: int, depth: int, rows: int, reach: int
    ) -> list[int]:
        """Return the rows that draft another token: those that, together, gain more by it than it costs.

        survivals: of the rows that may, that their drafts are right so far. expected: tokens that the step is to write
        with what is drafted already. drafted: tokens of all rows' drafts, in `depth` forwards.
        """
        every = list(range(len(survivals)))
        if self._cost is None or not every:
            return every
        if self.step_s is None or not self._known:
            return every if depth < self._blind else []
        step = self._cost(rows + drafted, rows, reach)
        rate = expected / (step + (depth - 1) * self.step_s)
        more = self._cost(rows + drafted + len(survivals), rows, reach) - step
        gains = [survival * self._confidence.mean for survival in survivals]
        going = [row for row in every if gains[row] > rate * more / len(survivals)]
        worth = sum(gains[row] for row in going)
        return going if worth > rate * (self.step_s + more * len(going) / len(survivals)) else []
