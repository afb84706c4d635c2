"""Priors of the drafters' calibration, fitted to recorded answers: what calibration.py and context.py begin with.

    python benchmarks/fit_priors.py BENCHMARK_FOLDER/outputs/none-b8.jsonl [MORE.jsonl ...]

The answers are those of a benchmark's plain run, as in replay.py; take several data sets. All guesses of method
`context` on them are collected, and a ridge regression explains by their leading match and their vote which were right.
What a run learns about single tokens is left out. Printed as the two files have them.
Limit: what was hardly seen is drawn towards an even chance, so look at the counts.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import exp

import torch
from replay import Answers, read_answers, replay

from ragspec.speculation.drafters.calibration import AGREEMENT, LENGTHS, MOST_ORIGINS, Calibration, Features
from ragspec.speculation.drafters.context import (
    OTHER_CONTEXT,
    OTHER_OUTPUT,
    OUTPUT,
    PRIOR_LOG_ODDS,
    PROMPT,
    ContextDrafter,
)

OWN = (PROMPT, OUTPUT)  # origins that are not doubted
RIDGE = 1.0  # times half the square of each weight, against the log likelihood of all guesses
STEPS = 30
THRESHOLD = 0.2  # a guess less likely than this is not verified in the replay; it is scored all the same

Guesses = list[tuple[Features, bool]]
Effect = tuple[str, int]  # a family of weights, and which of it


class Recorder(Calibration):
    """A calibration that keeps every guess that was scored."""

    def __init__(self) -> None:
        super().__init__(PRIOR_LOG_ODDS)
        self.guesses: Guesses = []

    def observe(self, features: Features, hit: bool) -> None:
        self.guesses.append((features, hit))
        super().observe(features, hit)


def collect(answers: Answers) -> Guesses:
    """Return the guesses that the context drafter makes on recorded answers, and whether they were right."""
    drafter = ContextDrafter()
    drafter.calibration = recorder = Recorder()
    replay(drafter, answers, THRESHOLD)
    return recorder.guesses


def effects(features: Features) -> list[Effect]:
    """Return the weights that add up to a guess's log odds, by name."""
    (origin, bucket), (share, origins, several), *_ = features
    named = [("length", bucket), ("share", share)]
    named += [("origins", origins)] * (origins > 1) + [("several", 1)] * several
    return named + [("doubt", origin)] * (origin not in OWN)


def fit(guesses: Guesses) -> dict[Effect, float]:
    """Return the weights: logistic regression by Newton's method; those of the shares average to zero.

    So a length's weight is the log odds that such a match goes on at the average vote.
    """
    rows = [effects(features) for features, _ in guesses]
    counts = Counter(effect for row in rows for effect in row)
    column = {effect: i for i, effect in enumerate(counts)}
    x = torch.zeros(len(rows), len(column), dtype=torch.float64)
    for i, row in enumerate(rows):
        x[i, [column[effect] for effect in row]] = 1
    y = torch.tensor([float(hit) for _, hit in guesses], dtype=torch.float64)
    weights = torch.zeros(len(column), dtype=torch.float64)
    for _ in range(STEPS):
        chance = torch.sigmoid(x @ weights)
        slope = x.T @ (chance - y) + RIDGE * weights
        curvature = x.T @ (x * (chance * (1 - chance))[:, None]) + RIDGE * torch.eye(len(column), dtype=torch.float64)
        weights -= torch.linalg.solve(curvature, slope)
    found = dict(zip(column, weights.tolist(), strict=True))
    average = sum(found[effect] * count for effect, count in counts.items() if effect[0] == "share") / len(rows)
    moved = {"share": -average, "length": average}
    return {effect: weight + moved.get(effect[0], 0.0) for effect, weight in found.items()}


def chance(log_odds: float) -> float:
    """Return the probability."""
    return 1 / (1 + exp(-log_odds))


def main(paths: Sequence[str]) -> None:
    """Print the priors. Raises SystemExit where there is nothing to fit them to."""
    if not paths:
        raise SystemExit(__doc__)
    guesses = [guess for path in paths for guess in collect(read_answers(path))]
    if not guesses:
        raise SystemExit(f"no guess was made on the answers of {', '.join(paths)}: nothing to fit")
    found = fit(guesses)
    counts = Counter(effect for features, _ in guesses for effect in effects(features))

    def shown(name: str, values: Iterable[int], form: Callable[[float], float] = float) -> str:
        return ", ".join(f"{form(found[name, n]):.2f}" if (name, n) in found else "unseen" for n in values)

    lengths, shares = range(len(LENGTHS)), range(len(AGREEMENT))
    print(f"# {len(guesses):,} guesses, {sum(hit for _, hit in guesses) / len(guesses):.1%} of them right")
    print(f"PRIOR = ({shown('length', lengths, chance)})  # {[counts['length', n] for n in lengths]} guesses")
    print(f"AGREEMENT = ({shown('share', shares)})  # {[counts['share', n] for n in shares]} guesses")
    print(f"MORE_ORIGINS = (0.0, {shown('origins', range(2, MOST_ORIGINS + 1))})")
    print(f"MORE_MATCHES = {shown('several', [1])}")
    print(
        f"PRIOR_LOG_ODDS = {{OTHER_CONTEXT: {shown('doubt', [OTHER_CONTEXT])}, "
        f"OTHER_OUTPUT: {shown('doubt', [OTHER_OUTPUT])}}}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
