"""Statistics of a run: counts that add up, and ratios computed only at the end.

    >>> one = SpecStats(); one.record(drafted=4, accepted=3); one.record(drafted=0, accepted=0)
    >>> one.steps, one.acceptance_rate, one.mean_acceptance_length
    (2, 0.75, 4.0)

Standard library only. Limit: above `Reservoir.size` records, percentiles come from a uniform sample.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from math import ceil
from typing import Any, NamedTuple


@dataclass(slots=True)
class SpecStats:
    """Counts of one row, or the sum over a run. Every ratio is a property.

    Attributes:
        steps: target forwards that emitted tokens for the row, including those without a draft.
        cut: tokens that steps wrote beyond the end of an answer, so that steps + accepted - cut = output tokens.
        drafted_at: at [j], the drafting steps that drafted exactly j tokens.
        accepted_at: at [j], the drafting steps that accepted exactly j tokens.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    cut: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    _last: int = field(default=0, compare=False)  # accepted in the last step that drafted

    def record(self, drafted: int, accepted: int) -> None:
        """Count one target step that verified `drafted` tokens and kept `accepted` of them."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"accepted {accepted} of {drafted} drafted tokens")
        self.steps += 1
        if drafted:
            self.drafted += drafted
            self.accepted += accepted
            _bump(self.drafted_at, drafted)
            _bump(self.accepted_at, accepted)
            self._last = accepted

    def end(self, output_tokens: int) -> None:
        """Set the answer's length: do not count what the last step accepted beyond the answer's end."""
        beyond = self.steps + self.accepted - output_tokens - 1  # the bonus token is cut first
        if beyond > 0 and self.accepted_at:
            beyond = min(beyond, self._last)
            self.accepted -= beyond
            self.accepted_at[self._last] -= 1
            self.accepted_at[self._last - beyond] += 1
            self._last -= beyond
        self.cut = self.steps + self.accepted - output_tokens

    def add(self, other: SpecStats) -> None:
        """Add another row's counts to these."""
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.cut += other.cut
        for mine, theirs in ((self.drafted_at, other.drafted_at), (self.accepted_at, other.accepted_at)):
            for length, count in enumerate(theirs):
                _bump(mine, length, count)

    @property
    def drafted_steps(self) -> int:
        """Return how many steps verified a draft."""
        return sum(self.drafted_at)

    @property
    def acceptance_rate(self) -> float | None:
        """Return accepted over drafted tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Return tokens emitted per drafting step, including the bonus token (Leviathan et al. 2023)."""
        return 1 + self.accepted / self.drafted_steps if self.drafted_steps else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Return at [j] the share of drafts longer than j whose token j was accepted."""
        long_enough = [sum(self.drafted_at[j + 1 :]) for j in range(len(self.drafted_at) - 1)]
        return [round(sum(self.accepted_at[j + 1 :]) / n, 4) for j, n in enumerate(long_enough) if n]

    def to_json(self, method: str) -> dict[str, Any]:
        """Return the `speculation` object of an output line."""
        return {
            "method": method,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": _round(self.acceptance_rate),
            "mean_acceptance_length": _round(self.mean_acceptance_length),
        }


class Reservoir:
    """Percentiles of a stream in constant memory (Vitter's algorithm R, fixed seed)."""

    def __init__(self, size: int = 10_000) -> None:
        self.size = size
        self.count = 0
        self._values: list[float] = []
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        if len(self._values) < self.size:
            self._values.append(value)
        elif (slot := self._random.randrange(self.count)) < self.size:
            self._values[slot] = value

    def percentiles(self) -> dict[str, float] | None:
        """Return p50, p95 and p99 (nearest rank), or None without values."""
        if not self._values:
            return None
        ranked = sorted(self._values)
        return {f"p{p}": round(ranked[ceil(len(ranked) * p / 100) - 1], 6) for p in (50, 95, 99)}


OTHERS = "other causes"


class Causes:
    """Failed records by cause: the first message of each cause and its number of records, in bounded memory."""

    MOST = 1000  # distinct causes
    RANKED = 5  # causes in a report

    def __init__(self) -> None:
        self.records = 0
        self._counts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, cause: str, message: str, records: int = 1) -> None:
        """Count records that failed with `message`."""
        self.records += records
        if cause in self._counts or len(self._counts) < self.MOST:
            self._counts[cause] = self._counts.get(cause, 0) + records
            self._first.setdefault(cause, message)

    def merge(self, other: Causes) -> None:
        """Add another instance's counts."""
        for cause, count in other._counts.items():
            self.add(cause, other._first[cause], count)
        self.records += other.records - sum(other._counts.values())

    def ranked(self) -> list[tuple[str, int]]:
        """Return (first message, records) of the most frequent causes."""
        found = sorted(self._counts.items(), key=lambda item: -item[1])[: self.RANKED]
        return [(self._first[cause], count) for cause, count in found]

    @property
    def others(self) -> int:
        """Return how many records failed for causes that are not ranked."""
        return self.records - sum(count for _, count in self.ranked())

    def to_json(self) -> dict[str, Any]:
        """Return the `failures` entry of the stats file, {} without failures."""
        found: list[dict[str, Any]] = [{"records": count, "message": message} for message, count in self.ranked()]
        if self.others:
            found.append({"records": self.others, "message": OTHERS})
        return {"failures": found} if found else {}


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds spent by all runs that wrote an output."""

    runs: int = 0
    load_s: float = 0.0
    warmup_s: float = 0.0
    generate_s: float = 0.0

    @classmethod
    def of(cls, value: Any, runs: int = 0) -> Spent:
        """Return the value of a JSON object, zeros if it is malformed. runs: the default if it has no count."""
        try:
            seconds = (float(value[key]) for key in ("load_s", "warmup_s", "generate_s"))
            return cls(int(value.get("runs", runs)), *seconds)
        except (KeyError, TypeError, AttributeError, ValueError):
            return cls()

    def to_json(self) -> dict[str, Any]:
        """Return the object in run.json and in the stats file."""
        seconds = {"load_s": self.load_s, "warmup_s": self.warmup_s, "generate_s": self.generate_s}
        return {"runs": self.runs, **{name: _round(value) for name, value in seconds.items()}}


@dataclass(frozen=True, slots=True)
class OutputTotals:
    """What an output holds, over all runs that wrote it, and the seconds that they took."""

    records: int  # answered
    failed: int  # error lines
    prompt_tokens: int
    output_tokens: int
    spent: Spent
    failures: Causes

    def to_json(self) -> dict[str, Any]:
        """Return the `totals` object of the stats file."""
        counts = {name: getattr(self, name) for name in ("records", "failed", "prompt_tokens", "output_tokens")}
        return {**counts, **self.spent.to_json(), **self.failures.to_json()}


class Cost(NamedTuple):
    """What one answer took. undrafted: why nothing was drafted, if the request's settings forbid drafts.

    cached_prompt_tokens: 0 for all but the first answer to a prompt, whose tokens count once. valid: whether the answer
    has its required form, None if it has none. whole: whether it is complete. copies: how often its line has it.
    """

    output_tokens: int
    cached_prompt_tokens: int
    spec: SpecStats
    latency_s: float
    time_to_first_token_s: float | None
    undrafted: str
    valid: bool | None = None
    whole: bool = True
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules of a machine by domain: of a run, loading included, and of answering alone.

    Attributes:
        run_j, answering_j: Joules by domain; of domains that could be read all the time. Empty before answering begins.
    """

    run_j: dict[str, float]
    answering_j: dict[str, float]

    @property
    def answering(self) -> float:
        """Return the joules of answering, of all domains."""
        return sum(self.answering_j.values())

    def to_json(self, records: int, output_tokens: int) -> dict[str, Any]:
        """Return the `energy` object of the stats file."""
        found: dict[str, Any] = {
            "run_j": _round(sum(self.run_j.values())),
            "domains_j": {name: _round(value) for name, value in self.run_j.items()},
        }
        if self.answering > 0:  # a run can be too short for the counters
            found["answering_j"] = _round(self.answering)
            per = {"j_per_record": records, "j_per_output_token": output_tokens}
            found |= {name: _round(self.answering / count) for name, count in per.items() if count}
        return found


@dataclass(slots=True, kw_only=True)
class Totals:
    """Totals over records. Seconds are wall-clock; load, warm-up and generation are separate."""

    records: int = 0  # answered
    failed: int = 0  # error lines written
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    listed_tokens: int = 0  # output tokens as the lines have them: greedy answers to a prompt are computed once
    output_squares: int = 0  # of the output tokens of each record, for their spread
    shaped: int = 0  # answers with a required form
    valid: int = 0  # of those, answers that match it
    truncated: int = 0  # of those, invalid answers that were cut off
    load_s: float = 0.0
    warmup_s: float = 0.0
    prefill_s: float | None = None
    decode_s: float | None = None
    decode_tokens: int = 0  # tokens emitted in decode_s, without those of the prefill step
    peak_memory_gib: float = 0.0
    spec: SpecStats = field(default_factory=SpecStats)

    def count(self, prompt_tokens: int, costs: Iterable[Cost]) -> None:
        """Count an answered record. costs: one per answer."""
        self.records += 1
        self.prompt_tokens += prompt_tokens
        costs = list(costs)
        self.output_squares += sum(cost.output_tokens for cost in costs) ** 2
        for cost in costs:
            self.cached_prompt_tokens += cost.cached_prompt_tokens
            self.output_tokens += cost.output_tokens
            self.listed_tokens += cost.output_tokens * cost.copies
            self.spec.add(cost.spec)
            if cost.valid is not None:
                self.shaped += 1
                self.valid += cost.valid
                self.truncated += not (cost.whole or cost.valid)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Return tokens over seconds of the decode phase, None if the engine does not separate it."""
        return self.decode_tokens / self.decode_s if self.decode_s else None


@dataclass(slots=True, kw_only=True)
class WorkerSummary(Totals):
    """One worker's share of a run's totals, with its own seconds. deaths: how often it was replaced."""

    name: str
    host: str = ""
    alive: bool = False
    deaths: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the worker's entry in the stats file."""
        return {
            "worker": self.name,
            "host": self.host,
            "deaths": self.deaths,
            "records": self.records,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "output_tokens": self.output_tokens,
            "drafted": self.spec.drafted,
            "accepted": self.spec.accepted,
            "load_s": _round(self.load_s),
            "warmup_s": _round(self.warmup_s),
            "prefill_s": _round(self.prefill_s),
            "decode_s": _round(self.decode_s),
            "decode_tokens_per_s": _round(self.decode_tokens_per_s),
            "peak_memory_gib": _round(self.peak_memory_gib),
        }


@dataclass(slots=True, kw_only=True)
class RunSummary(Totals):
    """The totals of one run. Seconds are wall-clock.

    Attributes:
        method: The speculation method.
        records, failed, skipped: Records answered, records that became error lines, and records that were finished
            before this run.
        failed_before: Those of `skipped` that are error lines.
        read: Rows of the input that were read, finished or not.
        prompt_tokens, cached_prompt_tokens, output_tokens: Tokens of prompts, those of them that were not computed
            again, and tokens of answers.
        load_s, warmup_s, generate_s: Seconds to load the model, to warm it up, and to answer.
        prefill_s, decode_s: Seconds of `generate_s` that computed prompts and that decoded; None if the runner does not
            tell them apart.
        decode_tokens: Tokens that were written in `decode_s`.
        peak_memory_gib: Largest memory in use, in GiB.
        spec: Counts of speculation: `steps`, `drafted`, `accepted`, `acceptance_rate`, `mean_acceptance_length`.
        shaped, valid, truncated: Structured answers, those of them that are complete and valid, and those cut off.
        time_to_first_token_s, latency_s: Seconds per record; `percentiles()` gives p50, p95 and p99.
        failures: Why records failed.
        totals: What the output holds and what all runs that wrote it took; None if the output cannot be resumed.
        notes: What the user should know, a line each.
        about: Config, versions, hashes and the runner's own statistics.
        retrieval: Statistics of searches; None without retrieval.
        workers: Each worker's share, if there are several.
        energy: Joules that the machine took; None if it does not tell.
        stopped: Why the run ended before its input did, "" if it did not.
        planned: The forecast of `ragspec plan` compared with what the run took, "" without a plan.
    """

    method: str = "none"
    skipped: int = 0  # finished before this run began
    failed_before: int = 0  # the error lines among `skipped`
    read: int = 0  # rows of the input
    generate_s: float = 0.0
    time_to_first_token_s: Reservoir = field(default_factory=Reservoir)
    latency_s: Reservoir = field(default_factory=Reservoir)
    retrieval: dict[str, Any] | None = None  # time of searches; waited_s: seconds that answering waited for them
    about: dict[str, Any] = field(default_factory=dict)  # what identifies the run: config, versions, hashes
    notes: list[str] = field(default_factory=list)
    failures: Causes = field(default_factory=Causes)  # causes of `failed`
    totals: OutputTotals | None = None  # for an output that can be resumed
    workers: list[WorkerSummary] = field(default_factory=list)  # for a run on several workers
    energy: Energy | None = None
    stopped: str = ""
    planned: str = ""

    def __repr__(self) -> str:
        return f"RunSummary({', '.join(f'{name} {value}' for name, value in self._told())})"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in self._told())
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<table>{rows}</table>{notes}"

    def _told(self) -> Iterator[tuple[str, str]]:
        """Yield names and values for a person."""
        yield "answered", f"{self.records:,}"
        if self.failed:
            yield "failed", f"{self.failed:,}"
        if self.skipped:
            yield "finished before", f"{self.skipped:,}"
        yield "output tokens", f"{self.output_tokens:,}"
        if self.tokens_per_s is not None:
            yield "tokens/s", f"{self.tokens_per_s:.1f}"
        yield "method", self.method
        if self.spec.acceptance_rate is not None:
            yield "accepted", f"{self.spec.acceptance_rate:.1%}"

    def add_to(self, spent: Spent) -> Spent:
        """Return the time of earlier runs plus this one."""
        return Spent(
            spent.runs + 1,
            spent.load_s + self.load_s,
            spent.warmup_s + self.warmup_s,
            spent.generate_s + self.generate_s,
        )

    @property
    def in_flight(self) -> int:
        """Return how many records are read and not finished."""
        return max(0, self.read - self.skipped - self.records - self.failed)

    @property
    def tokens_per_s(self) -> float | None:
        """Return output tokens over generation seconds."""
        return self.output_tokens / self.generate_s if self.generate_s and self.output_tokens else None

    @property
    def tokens_per_step(self) -> float | None:
        """Return output tokens per row and target step, including steps without a draft."""
        return self.output_tokens / self.spec.steps if self.spec.steps else None

    @property
    def requests_per_s(self) -> float | None:
        """Return answered records over generation seconds."""
        return self.records / self.generate_s if self.generate_s and self.records else None

    def to_json(self) -> dict[str, Any]:
        """Return the stats file's object."""
        spec = self.spec.to_json(self.method) | {
            "cut": self.spec.cut,
            "drafted_steps": self.spec.drafted_steps,
            "tokens_per_step": _round(self.tokens_per_step),
            "acceptance_by_position": self.spec.acceptance_by_position,
        }
        return {
            "records": self.records,
            "failed": self.failed,
            "skipped": self.skipped,
            "failed_before": self.failed_before,
            **self.failures.to_json(),
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "output_tokens": self.output_tokens,
            "load_s": _round(self.load_s),
            "warmup_s": _round(self.warmup_s),
            "generate_s": _round(self.generate_s),
            "tokens_per_s": _round(self.tokens_per_s),
            "prefill_s": _round(self.prefill_s),
            "decode_s": _round(self.decode_s),
            "decode_tokens_per_s": _round(self.decode_tokens_per_s),
            "requests_per_s": _round(self.requests_per_s),
            "time_to_first_token_s": self.time_to_first_token_s.percentiles(),
            "latency_s": self.latency_s.percentiles(),
            "peak_memory_gib": _round(self.peak_memory_gib),
            "speculation": spec,
            **({"structured": self._structured()} if self.shaped else {}),
            **({"retrieval": self.retrieval} if self.retrieval else {}),
            **({"energy": self.energy.to_json(self.records, self.output_tokens)} if self.energy else {}),
            **({"workers": [worker.to_json() for worker in self.workers]} if self.workers else {}),
            **({"totals": self.totals.to_json()} if self.totals else {}),
            "notes": self.notes,
            **self.about,
        }

    def _structured(self) -> dict[str, int]:
        return {"answers": self.shaped, "valid": self.valid, "truncated": self.truncated}


def _bump(counts: list[int], at: int, by: int = 1) -> None:
    if at >= len(counts):
        counts.extend([0] * (at + 1 - len(counts)))
    counts[at] += by


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
