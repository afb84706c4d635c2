"""The audit: does speculation change any answer? Counts exact matches, numeric ties with their margins, and bugs.

Two runs of the same records are compared token by token. Where they diverge, the model itself (referee.py) says how far
the speculative token is below its best one. Float sums depend on their order, so a forward of another shape may flip a
tie; by how much is measured on this machine. Anything beyond that is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from ragspec.benchmark.comparison import describe_quality
from ragspec.benchmark.passes import Answer, Answers
from ragspec.benchmark.results import Quality
from ragspec.records import Sampling

SAFETY = 8.0  # a tie is within this many times the difference between shapes


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two answers to one record diverge. A token is None if its answer had ended."""

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
    """The referee's finding. Shortfalls: how far each token is below the best, in logits (or in probability)."""

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

    def judge(self, divergence: Divergence) -> tuple[float, float, float]:
        """Return the shortfalls of the speculative and the plain token, and the difference between shapes."""


@dataclass(slots=True)
class Audit:
    """Counts: every record is identical, a tie, a bug, or answered in one run only."""

    identical: int = 0
    ties: list[Verdict] = field(default_factory=list)
    bugs: list[Verdict] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict) -> bool:
        """Add a verdict; return whether it is a tie."""
        (self.ties if verdict.tie else self.bugs).append(verdict)
        return verdict.tie

    @property
    def records(self) -> int:
        """Number of records compared."""
        return self.identical + len(self.ties) + len(self.bugs) + len(self.unanswered)

    def to_json(self) -> dict[str, Any]:
        """Return the audit as in verify.json."""
        return {
            "records": self.records,
            "identical": self.identical,
            "ties": [asdict(verdict) for verdict in self.ties],
            "bugs": [asdict(verdict) for verdict in self.bugs],
            "unanswered": self.unanswered,
        }


def divergences(plain: Answers, speculative: Answers, audit: Audit) -> Iterator[Divergence]:
    """Yield where answers diverge; count identical and unanswered records in `audit`."""
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
            yield _divergence(answer, other)


def _divergence(plain: Answer, speculative: Answer) -> Divergence:
    """Return the first divergence of two different answers."""
    one, two = plain.token_ids, speculative.token_ids
    at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    return Divergence(
        id=plain.id,
        position=at,
        plain=one[at] if at < len(one) else None,
        speculative=two[at] if at < len(two) else None,
        prompt=plain.prompt_token_ids,
        common=one[:at],
        sampling=plain.sampling,
        grammar=plain.grammar,
    )


def judge(divergence: Divergence, referee: Callable[[], Referee]) -> Verdict:
    """Return whether a divergence is a tie. It never is if one answer ended where the other goes on.

    referee: returns the referee, loaded on first use.
    """
    where = divergence.id, divergence.position, divergence.plain, divergence.speculative
    if divergence.plain is None or divergence.speculative is None:
        return Verdict(*where, None, None, 0.0, False)
    shortfall, plain_shortfall, noise = referee().judge(divergence)
    return Verdict(*where, shortfall, plain_shortfall, noise, max(shortfall, plain_shortfall) <= SAFETY * noise)


# -- bits ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bits:
    """How many answers have the same tokens with the same log-probabilities, bit for bit.

    Attributes:
        records: Of both runs.
        same: Answered in both, with the same bits.
        promised: Whether the run promises it, so that any other is a fault.
        first: What differs: record id, position, and the two log-probabilities.
    """

    records: int
    same: int
    promised: bool
    first: list[tuple[str, int, float | None, float | None]]


FIRST = 5  # differences that are named


def compare_bits(plain: Answers, speculative: Answers, promised: bool) -> Bits:
    """Compare the log-probabilities of two runs' answers."""
    pairs = [
        (name, one, speculative.answered[name]) for name, one in plain.answered.items() if name in speculative.answered
    ]
    differing = [found for name, one, two in pairs if (found := _first_difference(name, one, two)) is not None]
    names = {*plain.answered, *speculative.answered, *plain.failed, *speculative.failed}
    return Bits(len(names), len(pairs) - len(differing), promised, differing[:FIRST])


def _first_difference(name: str, one: Answer, two: Answer) -> tuple[str, int, float | None, float | None] | None:
    """Return where two answers' tokens or log-probabilities differ first, None if nowhere."""
    runs = (zip(each.token_ids, each.token_logprobs, strict=True) for each in (one, two))
    for at, (plain, other) in enumerate(zip_longest(*runs)):
        if plain != other:
            return name, at, plain and plain[1], other and other[1]
    return None


# -- findings --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run compared with another, or with the reference."""

    run: str
    against: str
    audit: Audit

    def to_json(self) -> dict[str, Any]:
        """Return it as in verify.json."""
        return {"run": self.run, "against": self.against, **self.audit.to_json()}


@dataclass(frozen=True, slots=True)
class Tested:
    """What the run with speculation drafted: without draft tokens, identical answers prove nothing."""

    drafted: int
    accepted: int
    notes: tuple[str, ...]

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield lines and their styles."""
        if self.drafted:
            yield f"{self.accepted:,} of {self.drafted:,} drafted tokens were accepted", ""
        else:
            yield "no token was drafted, so speculation was not tested", "yellow"
        for note in self.notes:
            yield f"note: {note}", "yellow"


@dataclass(slots=True)
class Findings:
    """All comparisons, the method against plain decoding first, and what could not be compared.

    quality: of both runs' answers, if records have references. bits: None if they were not compared. tested: what the
    run with speculation drafted.
    """

    comparisons: list[Comparison] = field(default_factory=list)
    reference_ids: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    quality: dict[str, Quality] = field(default_factory=dict)
    bits: Bits | None = None
    tested: Tested | None = None

    def to_json(self, reference: str, seed: int) -> dict[str, Any]:
        """Return the content of verify.json: the first comparison on top, those with the reference below it."""
        first, *others = self.comparisons
        return first.to_json() | {
            "reference": {
                "against": reference,
                "records": self.reference_ids,
                "seed": seed,
                "comparisons": [comparison.to_json() for comparison in others],
            },
            "tested": None if self.tested is None else asdict(self.tested),
            "bits": None if self.bits is None else asdict(self.bits),
            "not_compared": self.left_out,
            "quality": {name: asdict(quality) for name, quality in self.quality.items()},
        }

    @property
    def failed(self) -> bool:
        """Whether an answer changed, bits that should not, one of the two runs lacks answers, or none was compared."""
        audits = [comparison.audit for comparison in self.comparisons]
        broken = self.bits is not None and self.bits.promised and self.bits.same < self.bits.records
        return broken or any(audit.bugs for audit in audits) or bool(audits[0].unanswered) or not audits[0].records


def print_findings(console: Console, found: Findings, folder: Path) -> None:
    """Print the comparisons, and a line for each difference."""
    for comparison in found.comparisons:
        audit, what = comparison.audit, f"{comparison.run} against {comparison.against}"
        same = f"{audit.identical} of {audit.records} answers are identical, token for token"
        console.print(f"{what}: {same if audit.records else 'no answer could be compared'}", markup=False)
        for line, style in _differences(audit):
            console.print(line, markup=False, style=style)
    for line, style in found.tested.lines() if found.tested else ():
        console.print(line, markup=False, style=style)
    for line in describe_quality(found.quality):
        console.print(line, markup=False)
    if found.bits is not None:
        for line, style in _describe_bits(found.bits):
            console.print(line, markup=False, style=style)
    for why in found.left_out:
        console.print(f"not compared: {why}", markup=False, style="yellow")
    if any(comparison.audit.bugs for comparison in found.comparisons):
        console.print(f"reproducers in {folder / 'bugs'}", markup=False)
    console.print(f"details in {folder / 'verify.json'}", markup=False)


def _differences(audit: Audit) -> Iterator[tuple[str, str]]:
    for kind, verdicts, style in (("tie", audit.ties, "yellow"), ("BUG", audit.bugs, "red")):
        for verdict in verdicts:
            yield f"{kind}: {_describe(verdict)}", style
    if audit.unanswered:
        names = ", ".join(audit.unanswered[:5])
        yield f"{len(audit.unanswered)} not answered in both runs: {names}", "yellow"


def _describe_bits(bits: Bits) -> Iterator[tuple[str, str]]:
    yield f"{bits.same} of {bits.records} answers have the same log-probabilities, bit for bit", ""
    kind, style = ("BUG", "red") if bits.promised else ("rounding", "yellow")
    for name, position, plain, other in bits.first:
        yield f'{kind}: "{name}", token {position}: {other} instead of {plain}', style


def _describe(verdict: Verdict) -> str:
    where = f'"{verdict.id}", token {verdict.position}: {verdict.speculative} instead of {verdict.plain}'
    if verdict.shortfall is None:
        return f"{where}: one answer ends where the other continues"
    margin = max(verdict.shortfall, verdict.plain_shortfall or 0.0)
    return f"{where}, {margin:.1e} below the best token, where shapes alone make a difference of {verdict.noise:.1e}"
