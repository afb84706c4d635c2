"""What an audit found, for verify.json and for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ragspec.audit.lossless import Audit, Verdict
from ragspec.benchmark.grading import told
from ragspec.benchmark.results import Quality


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run compared with another, or with the reference."""

    run: str
    against: str
    audit: Audit

    def to_json(self) -> dict[str, Any]:
        """Return it as verify.json holds it."""
        return {"run": self.run, "against": self.against, **self.audit.to_json()}


@dataclass(slots=True)
class Findings:
    """All comparisons, the method against plain decoding first, and what could not be compared.

    quality: of both runs' answers, where records have references.
    """

    comparisons: list[Comparison] = field(default_factory=list)
    reference_ids: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    quality: dict[str, Quality] = field(default_factory=dict)

    def to_json(self, reference: str, seed: int) -> dict[str, Any]:
        """Return what verify.json holds: the first comparison on top, those with the reference under its name."""
        first, *others = self.comparisons
        return first.to_json() | {
            "reference": {
                "against": reference,
                "records": self.reference_ids,
                "seed": seed,
                "comparisons": [comparison.to_json() for comparison in others],
            },
            "not_compared": self.left_out,
            "quality": {name: asdict(quality) for name, quality in self.quality.items()},
        }

    @property
    def failed(self) -> bool:
        """Whether an answer changed, or one of the two runs lacks some."""
        audits = [comparison.audit for comparison in self.comparisons]
        return any(audit.bugs for audit in audits) or bool(audits[0].unanswered)


def print_findings(console: Console, found: Findings, folder: Path) -> None:
    """Print what was compared with what, and a line for each difference."""
    for comparison in found.comparisons:
        audit, what = comparison.audit, f"{comparison.run} against {comparison.against}"
        same = f"{audit.identical} of {audit.records} answers are identical, token for token"
        console.print(f"{what}: {same if audit.records else 'no answer could be compared'}", markup=False)
        for line, style in _differences(audit):
            console.print(line, markup=False, style=style)
    for line in told(found.quality):
        console.print(line, markup=False)
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


def _describe(verdict: Verdict) -> str:
    where = f'"{verdict.id}", token {verdict.position}: {verdict.speculative} instead of {verdict.plain}'
    if verdict.shortfall is None:
        return f"{where}: one answer ends where the other goes on"
    margin = max(verdict.shortfall, verdict.plain_shortfall or 0.0)
    return f"{where}, {margin:.1e} below the best token, where shapes alone make a difference of {verdict.noise:.1e}"
