"""How likely a guess is right: logistic regression on what is known of the guess, learnt while the run goes on.

    probability = sigmoid(sum of the weights of its features)

Its features: where the leading match stands and how long it is, how much of the vote agrees and of how many sources,
the guessed token, the token before it, how the chain began. Each weight learns at its own pace (Adagrad, Duchi et al.
2011), never slower than the run may change. They start from what other records taught (docs/log.md).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from math import exp, log, sqrt
from typing import Any

Features = tuple[int, ...]

LENGTHS = (0, 1, 2, 3, 4, 5, 7, 9, 13, 21)  # the least match length of each bucket
PRIOR = (0.10, 0.30, 0.50, 0.63, 0.70, 0.75, 0.80, 0.83, 0.88, 0.93)
SHARES = (0.5, 0.999)  # of the vote: minority, majority, all
AGREEMENT = (-1.5, -0.6, 0.4)  # in log odds, of each share
SECOND_SOURCE, THIRD_SOURCE, MORE_MATCHES = 0.2, 0.8, 1.0  # in log odds, where they agree
PACE = 0.3
SLOWEST = 25.0  # squared errors after which a weight's pace falls no further
SURE = 5.0  # log odds that no estimate goes beyond
LEAST_ERROR = 1.001 / (1 + exp(SURE))  # of an estimate that is as sure as it may be, and right
_FAMILY, _AGREEING, _GUESS, _BEFORE, _START = (n << 32 for n in range(5))
_LENGTH_BUCKET = [bisect_right(LENGTHS, length) - 1 for length in range(LENGTHS[-1] + 1)]


def length_bucket(length: int) -> int:
    """Return the bucket of a match of `length` tokens."""
    return _LENGTH_BUCKET[length] if length <= LENGTHS[-1] else len(LENGTHS) - 1


class Weights(dict[int, float]):
    """Weights by feature; one that has learnt nothing yet is what it begins with, and is not stored for being asked."""

    def __init__(self, doubts: Mapping[int, float]) -> None:
        super().__init__()
        self._doubts = doubts

    def __missing__(self, feature: int) -> float:
        if feature < _AGREEING:
            prior = PRIOR[feature & 255]
            return log(prior / (1 - prior)) + self._doubts.get(feature >> 8, 0.0)
        if feature < _GUESS:
            more = (0.0, SECOND_SOURCE, THIRD_SOURCE)[feature >> 2 & 3]
            return AGREEMENT[feature & 3] + more + (MORE_MATCHES if feature & 16 else 0.0)
        return 0.0


class Calibration:
    """The weights. doubts: log odds that a source begins with, more or less than the others."""

    def __init__(self, doubts: Mapping[int, float] | None = None) -> None:
        self._weights = Weights(doubts or {})
        self._errors: dict[int, float] = {}  # squared, summed
        self.hits = 0
        self.trials = 0
        self._bins = [[0.0, 0.0] for _ in range(10)]  # predicted, hits: for the calibration error

    @staticmethod
    def features(
        source: int,
        length: int,
        guess: int,
        before: int,
        depth: int = 0,
        share: float = 1.0,
        sources: int = 1,
        matches: int = 1,
    ) -> Features:
        """Return what is known of a guess.

        source, length: of the leading match, with the chain's tokens so far. depth: tokens of the chain before this
        one. share: of the vote. sources, matches: how many agree.
        """
        level = 0 if share < SHARES[0] else 1 if share < SHARES[1] else 2
        return (
            _FAMILY | source << 8 | length_bucket(length),
            _AGREEING | (matches > sources) << 4 | (min(sources, 3) - 1) << 2 | level,
            _GUESS | guess,
            _BEFORE | before,
            _START | min(length - depth, 12) << 2 | min(depth, 3),
        )

    def odds(self, source: int, length: int) -> float:
        """Return the odds that a match goes on, by its source and length alone: what its vote weighs."""
        return exp(self._weights[_FAMILY | source << 8 | length_bucket(length)])

    def estimate(self, features: Features) -> float:
        """Return the probability that such a guess is right."""
        total = sum(map(self._weights.__getitem__, features))
        return 1 / (1 + exp(-max(-SURE, min(SURE, total))))

    def observe(self, features: Features, hit: bool) -> None:
        """Learn from one guess that has been compared with what was written."""
        estimate = self.estimate(features)
        error = hit - estimate
        self.trials += 1
        self.hits += hit
        cell = self._bins[min(9, int(estimate * 10))]
        cell[0] += estimate
        cell[1] += hit
        if abs(error) <= LEAST_ERROR:
            return  # at the bound: weights would grow for ever, and take as long to come back
        for feature in features:
            squared = self._errors[feature] = min(SLOWEST, self._errors.get(feature, 1.0) + error * error)
            self._weights[feature] += PACE * error / sqrt(squared)

    @property
    def error(self) -> float | None:
        """Expected calibration error: mean distance of estimates from what came, over ten bins."""
        if not self.trials:
            return None
        return sum(abs(predicted - hits) for predicted, hits in self._bins) / self.trials


def judged(drafter: Any) -> dict[str, Any]:
    """Return how well a drafter judges its guesses, for the statistics; empty where it has made none."""
    calibration = getattr(drafter, "calibration", None)
    if calibration is None or calibration.error is None:
        return {}
    return {"calibration_error": round(calibration.error, 4), "guesses_scored": calibration.trials}
