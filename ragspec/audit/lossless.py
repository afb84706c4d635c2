"""The audit: does speculation change any answer? Exact matches, numeric ties with their margins, and bugs.

Two runs of the same records are compared token by token. Where two answers part, the model itself is asked (referee.py)
how much worse the speculative token is than the one it would choose. Sums of floats depend on their order, so another
shape of a forward may turn a tie; by how much, is measured on this machine too. Anything beyond is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

SAFETY = 8.0  # a tie lies within so many times the difference that shapes were seen to make


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two answers to one record part. A token is None where its answer had ended."""

    id: str
    position: int
    plain: int | None
    speculative: int | None
    prompt: list[int] = field(repr=False)
    common: list[int] = field(repr=False)  # of the answers, before `position`
    sampling: dict[str, Any] = field(repr=False)


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


def partings(plain: Iterable[dict[str, Any]], speculative: Iterable[dict[str, Any]], audit: Audit) -> Iterator[Parting]:
    """Yield where answers part; count the identical and the unanswered ones in `audit`."""
    mine = {line["id"]: line for line in speculative}
    for line in plain:
        other = mine.pop(line["id"], {})
        if "token_ids" not in line or "token_ids" not in other:
            audit.unanswered.append(line["id"])
            continue
        one, two = line["token_ids"], other["token_ids"]
        if one == two:
            audit.identical += 1
            continue
        at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        yield Parting(
            line["id"],
            at,
            one[at] if at < len(one) else None,
            two[at] if at < len(two) else None,
            line["prompt_token_ids"],
            one[:at],
            line["sampling"],
        )
    audit.unanswered += list(mine)


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
