"""The audit: does speculation change any answer? Exact matches, numeric ties with their margins, and bugs.

Two runs of the same records are compared token by token. Where two answers part, the model itself is asked (referee.py)
how much worse the speculative token is than the one it would choose. Sums of floats depend on their order, so a forward
of another shape may turn a tie; by how much is measured on this machine. Anything beyond that is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ragspec.benchmark.answers import Answer, Answers
from ragspec.records import Sampling

SAFETY = 8.0  # a tie is within this many times the difference that shapes make


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two answers to one record part. A token is None where its answer had ended."""

    id: str
    position: int
    plain: int | None
    speculative: int | None
    prompt: list[int] = field(repr=False)
    common: list[int] = field(repr=False)  # of the answers, before `position`
    sampling: Sampling = field(repr=False)
    grammar: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the referee found. Shortfalls: how far each token is below the best, in logits (or in probability)."""

    id: str
    position: int
    plain: int | None
    speculative: int | None
    shortfall: float | None
    plain_shortfall: float | None
    noise: float
    tie: bool


class Referee(Protocol):
    """Judges one token after a prefix."""

    def judge(self, parting: Parting) -> tuple[float, float, float]:
        """Return the shortfalls of the speculative and of the plain token, and the difference that shapes make."""


@dataclass(slots=True)
class Audit:
    """The result: every record is identical, a tie, a bug, or was answered in one run only."""

    identical: int = 0
    ties: list[Verdict] = field(default_factory=list)
    bugs: list[Verdict] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict) -> bool:
        """Count a verdict; return whether it is a tie."""
        (self.ties if verdict.tie else self.bugs).append(verdict)
        return verdict.tie

    @property
    def records(self) -> int:
        """Records that were looked at."""
        return self.identical + len(self.ties) + len(self.bugs) + len(self.unanswered)

    def to_json(self) -> dict[str, Any]:
        """Return the audit as verify.json holds it."""
        return {
            "records": self.records,
            "identical": self.identical,
            "ties": [asdict(verdict) for verdict in self.ties],
            "bugs": [asdict(verdict) for verdict in self.bugs],
            "unanswered": self.unanswered,
        }


def partings(plain: Answers, speculative: Answers, audit: Audit) -> Iterator[Parting]:
    """Yield where answers part; count the identical and the unanswered ones in `audit`."""
    for run, other_run in ((plain, speculative), (speculative, plain)):
        lacking = [name for name in run.answered if name not in other_run.answered]
        audit.unanswered += [name for name in (*run.failed, *lacking) if name not in audit.unanswered]
    for name, answer in plain.answered.items():
        other = speculative.answered.get(name)
        if other is None:
            continue
        if answer.token_ids == other.token_ids:
            audit.identical += 1
        else:
            yield _parting(answer, other)


def _parting(plain: Answer, speculative: Answer) -> Parting:
    """Return where two answers that differ do so first."""
    one, two = plain.token_ids, speculative.token_ids
    at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    return Parting(
        id=plain.id,
        position=at,
        plain=one[at] if at < len(one) else None,
        speculative=two[at] if at < len(two) else None,
        prompt=plain.prompt_token_ids,
        common=one[:at],
        sampling=plain.sampling,
        grammar=plain.grammar,
    )


def judge(parting: Parting, referee: Callable[[], Referee]) -> Verdict:
    """Return whether a parting is a tie. An answer that ended where the other went on is never one.

    referee: gives the one to ask, which has to be loaded only then.
    """
    if parting.plain is None or parting.speculative is None:
        return Verdict(parting.id, parting.position, parting.plain, parting.speculative, None, None, 0.0, False)
    shortfall, plain_shortfall, noise = referee().judge(parting)
    tie = max(shortfall, plain_shortfall) <= SAFETY * noise
    return Verdict(
        parting.id, parting.position, parting.plain, parting.speculative, shortfall, plain_shortfall, noise, tie
    )
