"""Gates: what an evaluation must show, and whether its intervals show it.

    >>> parse_gate("f1 >= -0.5").decide(Estimate(0.2, -0.3, 0.7, 500))
    'passed'

A number with a sign is a difference from the other run, one without is the score itself. An interval that lies on the
wrong side of the number as a whole says worse; one that contains it cannot tell. Intervals of few records are too
narrow (bootstrap), so fewer than ENOUGH cannot tell either.

Scores that are equal on all records bootstrap to an interval without width, as if others could not differ. It is
widened by the rule of three: if none of n records differs, up to 3/n of all others may (95%), each by up to 100 points,
so 300/n points to both sides. Limit: output_tokens have no such scale and stay as they are, and so do differences: two
runs that score the same on every record have not become worse.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ragspec.errors import ConfigError, did_you_mean
from ragspec.quality.metrics import Estimate

FORM = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*([+-]?)\s*(\d+(?:\.\d*)?|\.\d+)\s*%?\s*", re.ASCII)
ENOUGH = 10  # records
NO_WIDTH = 1e-9  # points: equal values, averaged with rounding
UNBOUNDED = ("output_tokens",)  # not per cent
Outcome = Literal["passed", "worse", "unclear"]
PASSED: Outcome = "passed"
WORSE: Outcome = "worse"
UNCLEAR: Outcome = "unclear"
EXIT_CODES: dict[Outcome, int] = {PASSED: 0, WORSE: 1, UNCLEAR: 4}


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition on a score. sign: of the number as written, "" for a limit of the score itself."""

    text: str
    score: str
    comparison: str
    sign: str
    limit: float

    @property
    def compares(self) -> bool:
        """Return whether it is about the difference from another run."""
        return bool(self.sign)

    def decide(self, found: Estimate) -> Outcome:
        """Return what an estimate says about the condition."""
        wide = self.widened(found)
        low, high = wide.low, wide.high
        if low is None or high is None or not low <= high or _is_few(found):  # NaN tells nothing either
            return UNCLEAR
        holds = [self._holds(end) for end in (low, high)]
        return PASSED if all(holds) else UNCLEAR if any(holds) else WORSE

    def widened(self, found: Estimate) -> Estimate:
        """Return an estimate whose interval has a width, by the rule of three if all records score the same."""
        low, high = found.low, found.high
        fixed = found.exact or self.compares or self.score in UNBOUNDED
        if fixed or low is None or high is None or not high - low <= NO_WIDTH:
            return found
        margin = 300 / found.count
        return replace(found, low=max(low - margin, 0.0), high=min(high + margin, 100.0))

    def _holds(self, value: float) -> bool:
        if self.comparison.startswith(">"):
            return value > self.limit or (self.comparison == ">=" and value == self.limit)
        return value < self.limit or (self.comparison == "<=" and value == self.limit)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a gate. found: the estimate that decided. records: of both runs, scored or not; 0 if unknown."""

    gate: Gate
    found: Estimate
    outcome: Outcome
    records: int = 0

    def formatted(self) -> str:
        """Return it as a line."""
        few = f"; {self.found.count} records are too few" if _is_few(self.found) else ""
        part = f" on {self.found.count:,} of {self.records:,} records" if self.found.count < self.records else ""
        said = {PASSED: f"passed{part}", WORSE: f"failed{part}", UNCLEAR: f"undecided{part}{few}"}[self.outcome]
        return f"gate {self.gate.text}: {said}: {self.found.formatted(sign=self.gate.compares)}"

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {"gate": self.gate.text, "outcome": self.outcome, **self.found.to_json(), "of": self.records}


def _is_few(found: Estimate) -> bool:
    return found.count < ENOUGH and not found.exact


def parse_gate(text: str) -> Gate:
    """Return the gate that is written so: `f1 >= -0.5`. Raises ConfigError."""
    match = FORM.fullmatch(text)
    if match is None:
        raise ConfigError(
            f'--gate: "{text}" is not a valid condition; write it like "f1 >= -0.5" or "citation_precision >= 90"'
        )
    score, comparison, sign, number = match.groups()
    limit = float(f"{sign}{number}")
    if not sign and limit == 0 and comparison in (">=", "<"):
        always = "always" if comparison == ">=" else "never"
        raise ConfigError(
            f'--gate: "{text}" is {always} true; to test the difference from --against, give the number a sign: '
            f'"{score} {comparison} -0"'
        )
    return Gate(" ".join(text.split()), score, comparison, sign, limit)


def check_gates(gates: Sequence[Gate], known: Collection[str], missing: Mapping[str, str], *, compared: bool) -> None:
    """Raise ConfigError for a gate that cannot be decided, whatever the answers are.

    known: scores that there are. missing: why some of them are not computed here. compared: with another run.
    """
    for gate in gates:
        if gate.score not in known:
            raise ConfigError(f'--gate: "{gate.score}" is not a known score{did_you_mean(gate.score, known)}')
        if gate.score in missing:
            raise ConfigError(f'--gate "{gate.text}": {gate.score} is not computed: {missing[gate.score]}')
        if gate.compares and not compared:
            raise ConfigError(
                f'--gate "{gate.text}": a number with a sign is a difference; name the other run with --against, or '
                "leave the sign out"
            )


def check_computed(
    gates: Sequence[Gate], scores: Collection[str], others: Collection[str] | None, later: Collection[str]
) -> None:
    """Raise ConfigError for a gate on a score that no answer has. others: the other run's. later: not yet computed."""
    for gate in gates:
        own, other = "no answer has this score", "no answer in the other run has this score"
        for found, which in ((scores, own), (others, other)):
            if found is None or (which != own and not gate.compares):
                continue
            if gate.score not in found and gate.score not in later:
                why = "; scores need references, and citation scores also need passages to cite"
                raise ConfigError(f'--gate "{gate.text}": {gate.score} was not computed: {which}{why}')


def decide(
    gates: Sequence[Gate], scores: Mapping[str, Estimate], differences: Mapping[str, Estimate], records: int = 0
) -> list[Verdict]:
    """Return the verdict on each gate. Raises ConfigError for a score that no record has in both runs.

    records: of both runs, scored or not.
    """
    verdicts = []
    for gate in gates:
        found = (differences if gate.compares else scores).get(gate.score)
        if found is None:
            raise ConfigError(f'--gate "{gate.text}": no record has {gate.score}, so the gate cannot be evaluated')
        verdicts.append(Verdict(gate, gate.widened(found), gate.decide(found), records))
    return verdicts


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """Return 1 if a gate failed, else 4 if one cannot tell, else 0."""
    outcomes = {verdict.outcome for verdict in verdicts}
    return next((EXIT_CODES[outcome] for outcome in (WORSE, UNCLEAR) if outcome in outcomes), 0)
