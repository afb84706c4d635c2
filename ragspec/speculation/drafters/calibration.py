"""The probability that a guess is right: logistic regression on features of the guess, learnt during the run.

    probability = sigmoid(sum of the weights of its features)

A guess has one feature of each family: its leading match (origin and length), the vote (share and number of origins),
the guessed token, the token before it, and the start of its chain. Each weight has its own learning rate (Adagrad,
Duchi et al. 2011), which has a floor. Weights start from priors fitted to recorded answers (docs/lab/log.md;
benchmarks/fit_priors.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping
from itertools import product
from math import exp, log, sqrt
from typing import Any

LENGTHS = (0, 1, 2, 3, 4, 5, 7, 9, 13, 21)  # minimum match length of each bucket
PRIOR = (0.10, 0.30, 0.50, 0.63, 0.70, 0.75, 0.80, 0.83, 0.88, 0.93)  # chance that a match continues, by bucket
SHARES = (0.5, 0.999)  # of the vote: minority, majority, all
AGREEMENT = (-1.5, -0.6, 0.4)  # log odds of each share
ORIGINS = 4  # kinds of text
MOST_ORIGINS = 3  # more count as this many
MORE_ORIGINS, MORE_MATCHES = (0.0, 0.2, 0.8), 1.0  # log odds of 1, 2 and 3 origins; of several matches of one origin
LONGEST_START, DEEPEST = 12, 3  # limits of a chain's initial match length and depth; more count as these
PACE = 0.3
SLOWEST = 25.0  # squared errors after which a weight's learning rate falls no further
SURE = 5.0  # maximum absolute log odds of an estimate
LEAST_ERROR = 1.001 / (1 + exp(SURE))  # error of a right estimate at that maximum
_LENGTH_BUCKET = [bisect_right(LENGTHS, length) - 1 for length in range(LENGTHS[-1] + 1)]

MatchFeature = tuple[int, int]  # origin, length bucket
VoteFeature = tuple[int, int, bool]  # bucket of its share, origins, whether more matches than origins agree
StartFeature = tuple[int, int]  # match length at the chain's start, tokens of the chain since
Features = tuple[MatchFeature, VoteFeature, int, int, StartFeature]  # ints: the guessed token, the token before it


def length_bucket(length: int) -> int:
    """Return the bucket of a match of `length` tokens."""
    return _LENGTH_BUCKET[length] if length <= LENGTHS[-1] else len(LENGTHS) - 1


class Weights(dict[Any, float]):
    """The weights of one feature family. Reading an unseen weight returns its prior without storing it."""

    def __init__(self, prior: Callable[[Any], float]) -> None:
        super().__init__()
        self.prior = prior
        self._errors: dict[Hashable, float] = {}  # sums of squares

    def __missing__(self, feature: Any) -> float:
        return self.prior(feature)

    def learn(self, feature: Hashable, error: float) -> None:
        """Adjust the weight for `error`, by less the larger its past errors."""
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
    """The weights of all families. doubts: initial log odds of an origin relative to the others."""

    def __init__(self, doubts: Mapping[int, float] | None = None) -> None:
        self._match = Weights(_match_prior(doubts or {}))
        self._vote = Weights(_vote_prior)
        self._guess = Weights(_no_prior)
        self._before = Weights(_no_prior)
        self._start = Weights(_no_prior)
        self.least = 0.0  # probability below which a chain is currently useless
        self.hits = 0
        self.trials = 0
        self._bins = [[0.0, 0.0] for _ in range(10)]  # sums of estimates and of hits, for the calibration error

    def match_priors(self) -> list[float]:
        """Return the initial weights of matches, by origin and then by length bucket."""
        return [self._match.prior((origin, bucket)) for origin in range(ORIGINS) for bucket in range(len(LENGTHS))]

    def vote_priors(self) -> list[float]:
        """Return the initial weights of votes: by share, then by origins, then by whether several matches agree."""
        levels, origins = range(len(AGREEMENT)), range(1, MOST_ORIGINS + 1)
        return [self._vote.prior(vote) for vote in product(levels, origins, (False, True))]

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
        """Return the features of a guess.

        Args:
            origin: of the leading match.
            length: of the leading match, including the chain's tokens so far.
            guess: the guessed token.
            before: the token before it.
            depth: tokens of the chain before it.
            share: of the vote.
            origins: how many origins agree.
            matches: how many matches agree.
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
        """Return the odds that a match continues, by origin and length only: the weight of its vote."""
        return exp(self._match[origin, length_bucket(length)])

    def estimate(self, features: Features) -> float:
        """Return the probability that the guess is right."""
        match, vote, guess, before, start = features
        total = (
            self._match[match]
            + self._vote[vote]
            + self._guess.get(guess, 0.0)  # get: these have no prior, and it is faster than __missing__
            + self._before.get(before, 0.0)
            + self._start.get(start, 0.0)
        )
        return 1 / (1 + exp(-max(-SURE, min(SURE, total))))

    def observe(self, features: Features, hit: bool) -> None:
        """Learn from a guess compared with the target's token."""
        estimate = self.estimate(features)
        error = hit - estimate
        self.trials += 1
        self.hits += hit
        cell = self._bins[min(9, int(estimate * 10))]
        cell[0] += estimate
        cell[1] += hit
        if abs(error) <= LEAST_ERROR:
            return  # at the bound: the weights would grow without limit and take as long to come back
        families = self._match, self._vote, self._guess, self._before, self._start
        for weights, feature in zip(families, features, strict=True):
            weights.learn(feature, error)

    @property
    def error(self) -> float | None:
        """Return the expected calibration error: mean distance of estimates from hits over ten bins."""
        if not self.trials:
            return None
        return sum(abs(predicted - hits) for predicted, hits in self._bins) / self.trials


def follow_to(drafter: Any, least: float) -> None:
    """End a drafter's chains at a probability of `least`, if it is calibrated."""
    calibration = getattr(drafter, "calibration", None)
    if calibration is not None:
        calibration.least = least


def judged(drafter: Any) -> dict[str, Any]:
    """Return a drafter's calibration statistics, {} if it has made no guesses."""
    calibration = getattr(drafter, "calibration", None)
    if calibration is None or calibration.error is None:
        return {}
    return {"calibration_error": round(calibration.error, 4), "guesses_scored": calibration.trials}
