"""How many draft tokens to verify, per row and step: those that raise the expected tokens per second.

    (rows + sum of chosen survivals) / cost(rows + chosen)

Survival never rises along a chain, so the best M of all slots are prefixes of chains: sort them, and look at every M,
for the cost curve is not convex (two tokens may cost as much as eight). In a step that computes prompts too, which must
be paid anyway, a draft token has to earn its own seconds at the rate of a step without prompts.
Prior art: SmartSpec (arXiv:2406.14066), AdaServe (arXiv:2501.12162).
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.speculation.cost import Cost

LEAST_GAIN = 1.02  # below this, not speculating is as good


def allocate(survivals: Sequence[Sequence[float]], cost: Cost, reach: int, besides: int = 0) -> list[int]:
    """Return how many tokens of each row's chain to verify.

    survivals: per row, the probability of each prefix of its chain. reach: slots of the longest row. besides: tokens
    in the step that are not these rows' (prefill).
    """
    rows = len(survivals)
    slots = [(-value, depth, row) for row, chain in enumerate(survivals) for depth, value in enumerate(chain)]
    slots.sort()  # of equals the shallower first: each choice is prefixes of chains
    plain = rows / cost(rows, rows, reach)
    taken = [0] * rows
    best, rate = _best(slots, rows, cost, reach, plain * LEAST_GAIN)
    if besides:
        least = rate * cost.marginal(besides + rows, reach)
        best = sum(-value > least for value, _, _ in slots)
    for _, _, row in slots[:best]:
        taken[row] += 1
    return taken


def _best(
    slots: Sequence[tuple[float, int, int]], rows: int, cost: Cost, reach: int, least_rate: float
) -> tuple[int, float]:
    """Return how many of the slots, best first, make the most tokens per second, and how many that is.

    0 and `least_rate` where none makes more than that.
    """
    best, best_rate = 0, least_rate
    expected = float(rows)
    for chosen, (value, _, _) in enumerate(slots, 1):
        expected -= value
        rate = expected / cost(rows + chosen, rows, reach)
        if rate > best_rate:
            best, best_rate = chosen, rate
    return best, best_rate
