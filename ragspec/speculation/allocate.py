"""How many draft tokens to verify, per row and step: those that raise the expected tokens per second. Pure.

    (rows + sum of chosen survivals) / cost(rows + chosen)

Survival never rises along a chain, so the best M of all draft tokens are prefixes of chains: sort them and try every M,
because the cost curve is not convex (two tokens may cost as much as eight). A step that computes prompts has to be paid
for anyway; there a draft token must earn its own seconds at the rate of a step without prompts.
Prior art: SmartSpec (arXiv:2406.14066), AdaServe (arXiv:2501.12162).
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.speculation.cost import Cost

MARGIN = 0.5  # of what a draft token has to survive with on average: costs do have steps
LEAST_GAIN = 1.02  # over plain decoding; below it, not speculating is as good


def allocate(survivals: Sequence[Sequence[float]], cost: Cost, reach: int, besides: int = 0) -> list[int]:
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
    if besides:
        least = rate * cost.marginal(besides + rows, reach)
        best = sum(-value > least for value, _, _ in candidates)
    for _, _, row in candidates[:best]:
        taken[row] += 1
    return taken


def least_survival(rows: int, cost: Cost, reach: int, besides: int = 0) -> float:
    """Return a probability below which no draft token of such a step pays: chains need not be followed further.

    As of allocate(), whose choice it should not change: half of what a token would have to survive with if costs had no
    steps.
    """
    plain_s = cost(rows, rows, reach)
    if besides:
        token_s = cost.marginal(besides + rows, reach)
    else:
        several = (max(1, rows // 2), rows, 2 * rows, 4 * rows, 8 * rows)
        token_s = min((cost(rows + tokens, rows, reach) - plain_s) / tokens for tokens in several)
    return MARGIN * rows / plain_s * token_s


def hopeless(rows: int, cost: Cost, reach: int, besides: int) -> bool:
    """Return whether not even a certain draft token pays in a step that also computes `besides` tokens of prompts.

    allocate() takes none there.
    """
    return least_survival(rows, cost, reach, besides) >= MARGIN


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
