"""How often a draft model's tokens are right, by how sure it was of them: learnt while the run goes on. Pure.

>>> Confidence().chance(0.9)
0.9
"""

from __future__ import annotations

from bisect import bisect_right

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
