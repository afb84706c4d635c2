"""How likely a guess is right: logistic regression on what is known of the guess, learnt while the run goes on.

    probability = sigmoid(sum of the weights of its features)

A guess has one feature of each family: its leading match (where it is, how long), the vote (how much of it agrees, from
how many origins), the guessed token, the token before it, and how its chain began. Every weight learns at its own pace
(Adagrad, Duchi et al. 2011), and never stops learning. Weights start from priors that
other records taught (docs/lab/log.md; benchmarks/fit_priors.py fits such priors to recorded answers).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping
from math import exp, log, sqrt
from typing import Any

LENGTHS = (0, 1, 2, 3, 4, 5, 7, 9, 13, 21)  # the least match length of each bucket
PRIOR = (0.10, 0.30, 0.50, 0.63, 0.70, 0.75, 0.80, 0.83, 0.88, 0.93)  # chance that a match goes on, by bucket
SHARES = (0.5, 0.999)  # of the vote: minority, majority, all
AGREEMENT = (-1.5, -0.6, 0.4)  # in log odds, of each share
MOST_ORIGINS = 3  # told apart
MORE_ORIGINS, MORE_MATCHES = (0.0, 0.2, 0.8), 1.0  # in log odds: of 1, 2 and 3 origins; of several matches of one
LONGEST_START, DEEPEST = 12, 3  # match lengths at the chain's beginning, and depths in it, that are told apart
PACE = 0.3
SLOWEST = 25.0  # squared errors after which a weight's pace falls no further
SURE = 5.0  # log odds that no estimate goes beyond
LEAST_ERROR = 1.001 / (1 + exp(SURE))  # of an estimate that is as sure as it may be, and right
_LENGTH_BUCKET = [bisect_right(LENGTHS, length) - 1 for length in range(LENGTHS[-1] + 1)]

MatchFeature = tuple[int, int]  # origin, length bucket
VoteFeature = tuple[int, int, bool]  # bucket of its share, origins, whether more matches than origins agree
StartFeature = tuple[int, int]  # length of the match where the chain began, tokens of the chain since
Features = tuple[MatchFeature, VoteFeature, int, int, StartFeature]  # ints: the guessed token, the token before it


def length_bucket(length: int) -> int:
    """Return the bucket of a match of `length` tokens."""
    return _LENGTH_BUCKET[length] if length <= LENGTHS[-1] else len(LENGTHS) - 1


class Weights(dict[Any, float]):
    """The weights of one family of features. One that has learnt nothing is its prior, and is not stored when read."""

    def __init__(self, prior: Callable[[Any], float]) -> None:
        super().__init__()
        self._prior = prior
        self._errors: dict[Hashable, float] = {}  # squared, summed

    def __missing__(self, feature: Any) -> float:
        return self._prior(feature)

    def learn(self, feature: Hashable, error: float) -> None:
        """Move the weight against `error`, the less the more it has erred before."""
        squared = self._errors[feature] = min(SLOWEST, self._errors.get(feature, 1.0) + error * error)
        self[feature] += PACE * error / sqrt(squared)


def _match_prior(doubts: Mapping[int, float]) -> Callable[[MatchFeature], float]:
    log_odds = [log(chance / (1 - chance)) for chance in PRIOR]
    return lambda match: log_odds[match[1]] + doubts.get(match[0], 0.0)


def _vote_prior(vote: VoteFeature) -> float:
    share, origins, several = vote
    return AGREEMENT[share] + MORE_ORIGINS[origins - 1] + (MORE_MATCHES if several else 0.0)


def _no_prior(feature: Hashable) -> float:
    return 0.0


class Calibration:
    """The weights. doubts: log odds that an origin begins with, more or less than the others."""

    def __init__(self, doubts: Mapping[int, float] | None = None) -> None:
        self._match = Weights(_match_prior(doubts or {}))
        self._vote = Weights(_vote_prior)
        self._guess = Weights(_no_prior)
        self._before = Weights(_no_prior)
        self._start = Weights(_no_prior)
        self.least = 0.0  # probability of a chain, below which it is of no use at present
        self.hits = 0
        self.trials = 0
        self._bins = [[0.0, 0.0] for _ in range(10)]  # predicted, hits: for the calibration error

    @staticmethod
    def features(
        origin: int,
        length: int,
        guess: int,
        before: int,
        depth: int = 0,
        share: float = 1.0,
        origins: int = 1,
        matches: int = 1,
    ) -> Features:
        """Return what is known of a guess.

        origin, length: of the leading match, with the chain's tokens so far. depth: tokens of the chain before this
        one. share: of the vote. origins, matches: how many agree.
        """
        level = 0 if share < SHARES[0] else 1 if share < SHARES[1] else 2
        return (
            (origin, length_bucket(length)),
            (level, min(origins, MOST_ORIGINS), matches > origins),
            guess,
            before,
            (min(length - depth, LONGEST_START), min(depth, DEEPEST)),
        )

    def odds(self, origin: int, length: int) -> float:
        """Return the odds that a match goes on, by its origin and length alone: what its vote weighs."""
        return exp(self._match[origin, length_bucket(length)])

    def estimate(self, features: Features) -> float:
        """Return the probability that such a guess is right."""
        match, vote, guess, before, start = features
        total = (
            self._match[match]
            + self._vote[vote]
            + self._guess.get(guess, 0.0)  # get: without a prior, and quicker than asking for it
            + self._before.get(before, 0.0)
            + self._start.get(start, 0.0)
        )
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
        families = self._match, self._vote, self._guess, self._before, self._start
        for weights, feature in zip(families, features, strict=True):
            weights.learn(feature, error)

    @property
    def error(self) -> float | None:
        """Expected calibration error: mean distance of estimates from what came, over ten bins."""
        if not self.trials:
            return None
        return sum(abs(predicted - hits) for predicted, hits in self._bins) / self.trials


def follow_to(drafter: Any, least: float) -> None:
    """Have a drafter's chains end where they are less likely than `least`, if it knows how likely they are."""
    calibration = getattr(drafter, "calibration", None)
    if isinstance(calibration, Calibration):
        calibration.least = least


def judged(drafter: Any) -> dict[str, Any]:
    """Return how well a drafter judges its guesses, for the statistics; empty where it has made none."""
    calibration = getattr(drafter, "calibration", None)
    if calibration is None or calibration.error is None:
        return {}
    return {"calibration_error": round(calibration.error, 4), "guesses_scored": calibration.trials}
