"""How often a guess of some kind came true: a hierarchical beta estimate, learnt while the run goes on.

A kind is (source, length of the match, share of the vote, who else agrees). Few observations lean on the source and
length alone, and these on a prior. Old observations fade. Limit: the kinds are buckets; nothing is fitted between them.
"""

from __future__ import annotations

from bisect import bisect_right

LENGTHS = (0, 1, 2, 3, 4, 5, 7, 9, 13, 21)  # the least match length of each bucket
PRIOR = (0.10, 0.20, 0.35, 0.50, 0.60, 0.65, 0.72, 0.80, 0.87, 0.92)
SHARES = (0.5, 0.999)  # of the vote: minority, majority, all
LEAN = 8.0  # observations that the parent's estimate is worth
FADE_AT = 512  # observations after which a kind's counts are halved
_LENGTH_BUCKET = [bisect_right(LENGTHS, length) - 1 for length in range(LENGTHS[-1] + 1)]


def length_bucket(length: int) -> int:
    """Return the bucket of a match of `length` tokens."""
    return _LENGTH_BUCKET[length] if length <= LENGTHS[-1] else len(LENGTHS) - 1


class Calibration:
    """Estimates per kind; a kind is an int that `kind()` makes."""

    def __init__(self, doubts: dict[int, float] | None = None) -> None:
        """doubts: factor on the prior of a source that has yet to prove itself."""
        self._doubts = doubts or {}
        self._counts: dict[int, list[float]] = {}  # kind or family -> [hits, trials]
        self.hits = 0
        self.trials = 0
        self._bins = [[0.0, 0.0] for _ in range(10)]  # predicted, hits: for the calibration error

    @staticmethod
    def kind(source: int, length: int, share: float = 1.0, sources: int = 1, matches: int = 1) -> int:
        """Return the kind of a guess: of the leading match, and how many sources and matches agree with it."""
        bucket = 0 if share < SHARES[0] else 1 if share < SHARES[1] else 2
        witnesses = min(sources, 3) - 1 | (matches > sources) << 2
        return witnesses << 12 | source << 8 | length_bucket(length) << 2 | bucket

    def estimate(self, kind: int) -> float:
        """Return the probability that a guess of this kind is right."""
        source, bucket = kind >> 8 & 15, kind >> 2 & 63
        prior = min(PRIOR[-1], PRIOR[bucket] * self._doubts.get(source, 1.0))  # a factor over 1 is no certainty
        return _lean(self._counts.get(kind), _lean(self._counts.get(kind & 0xFFF | 3), prior))

    def observe(self, kind: int, hit: bool) -> None:
        """Learn from one guess that has been compared with what was written."""
        estimate = self.estimate(kind)
        self.trials += 1
        self.hits += hit
        cell = self._bins[min(9, int(estimate * 10))]
        cell[0] += estimate
        cell[1] += hit
        for key in (kind, kind & 0xFFF | 3):  # share bucket 3 does not occur: it stands for the family
            counts = self._counts.setdefault(key, [0.0, 0.0])
            counts[0] += hit
            counts[1] += 1
            if counts[1] >= FADE_AT:
                counts[0] /= 2
                counts[1] /= 2

    @property
    def error(self) -> float | None:
        """Expected calibration error: mean distance of estimates from what came, over ten bins."""
        if not self.trials:
            return None
        return sum(abs(predicted - hits) for predicted, hits in self._bins) / self.trials


def _lean(counts: list[float] | None, parent: float) -> float:
    hits, trials = counts or (0.0, 0.0)
    return (hits + LEAN * parent) / (trials + LEAN)
