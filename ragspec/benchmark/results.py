"""The results of a benchmark as data; the only reader and writer of results.json.

    results = read_results(Path("out/benchmark"))
    max(results.runs, key=lambda run: run.tokens_per_s or 0).name

Seconds are wall-clock; None means unknown to the runner. Limit: a file of another shape is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from ragspec.errors import ConfigError
from ragspec.json_text import JSONDecodeError, loads
from ragspec.quality.metrics import Estimate

NAME = "results.json"
# metrics of ratios; records per second where prompts differ, since longer answers are no gain
SPEED, DECODE_SPEED, RECORD_SPEED = "tokens_per_s", "decode_tokens_per_s", "records_per_s"
# figures that vary between passes: speeds, and acceptance where draft lengths follow measured costs
VARYING = (
    SPEED, DECODE_SPEED, "prefill_s", "decode_s", "acceptance_rate", "mean_acceptance_length", "tokens_per_step",
    "energy_j",
)  # fmt: skip
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a time per record, in seconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The figures of one pass over the input. batch_size: records in one batch, if the runner says."""

    batch_size: int | None
    records: int
    failed: int
    prompt_tokens: int
    cached_prompt_tokens: int | None = None  # prompt tokens served from the prefix cache
    output_tokens: int
    generate_s: float
    prefill_s: float | None
    decode_s: float | None
    tokens_per_s: float | None
    decode_tokens_per_s: float | None
    drafted: int
    accepted: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    tokens_per_step: float | None
    acceptance_by_position: tuple[float, ...]
    latency_s: Percentiles | None
    time_to_first_token_s: Percentiles | None
    peak_memory_gib: float
    energy_j: float | None = None  # of answering; None if the machine does not tell
    notes: tuple[str, ...] = ()

    @property
    def j_per_output_token(self) -> float | None:
        """Joules per output token; None if unknown."""
        return None if self.energy_j is None or not self.output_tokens else self.energy_j / self.output_tokens

    @property
    def records_per_s(self) -> float | None:
        """Answered records per second: the speed to compare where answers may differ in length."""
        return self.records / self.generate_s if self.generate_s else None

    @property
    def computed_prompt_tokens(self) -> int | None:
        """Prompt tokens not served from the prefix cache; None if unknown."""
        return None if self.cached_prompt_tokens is None else self.prompt_tokens - self.cached_prompt_tokens


@dataclass(frozen=True, kw_only=True)
class Run(Pass):
    """A pass with the candidate that ran it: an entry of `runs`.

    repeat: the number of the pass, from 1. identical: answers that equal, token for token, those of plain decoding's
    first pass; None if that did not run. workers: of a cluster; None for one process.
    """

    name: str
    peer: bool
    runner: str
    method: str
    num_tokens: int | Literal["auto"]
    repeat: int
    load_s: float
    warmup_s: float
    identical: int | None
    workers: int | None = None
    order: str = "rank"  # of passages in prompts


@dataclass(frozen=True, slots=True)
class Ratio:
    """A candidate's speed over its baseline's, in paired passes. low, high: the interval."""

    name: str
    baseline: str
    metric: str
    median: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval; None for a single pair."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def formatted(self) -> str:
        """Return it as text: 1.50x (1.40 to 1.60)."""
        span = "one pass" if self.low is None or self.high is None else f"{self.low:.2f} to {self.high:.2f}"
        return f"{self.median:.2f}x ({span})"

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval is above 1."""
        return self.low is not None and self.low > 1

    @property
    def is_slower(self) -> bool:
        """Whether the whole interval is below 1."""
        return self.high is not None and self.high < 1


@dataclass(frozen=True, slots=True)
class Quality:
    """The scores of a candidate's answers, and their record-by-record differences from the baseline's."""

    scores: dict[str, Estimate]
    baseline: str | None = None
    differences: dict[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of an answer. by: the model that proposed it. context: id of the passage it was copied from."""

    text: str
    by: Literal["target", "draft"]
    context: str | None


@dataclass(frozen=True, slots=True)
class Quote:
    """A passage of a record's prompt."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer, token by token. guessed_known: whether the runner reports which tokens came from a draft."""

    id: str
    question: str | None
    pieces: tuple[Piece, ...]
    passages: tuple[Quote, ...]
    guessed_known: bool
    speculation: dict[str, Any]  # as in an output line


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a forward by its number of tokens, and the size of the model."""

    points: tuple[tuple[int, float], ...]
    parameters: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device's peak memory bandwidth and arithmetic."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step. bound_s: its time at the device's peak speeds, None if unknown."""

    seconds: float
    bound_s: float | None


@dataclass(frozen=True, slots=True)
class Phase:
    """The steps that compute prompts or those that only decode, and the parts of their forwards."""

    steps: int
    seconds: float
    parts: dict[str, Part]


@dataclass(frozen=True, slots=True)
class Profile:
    """Where a pass's time went. seconds: all of it; what is in no phase and no draft is the rest."""

    seconds: float
    drafting_s: float
    phases: dict[str, Phase]

    @property
    def rest_s(self) -> float:
        """Sampling, scheduling, reading and writing."""
        return self.seconds - self.drafting_s - sum(phase.seconds for phase in self.phases.values())


@dataclass(frozen=True, slots=True)
class Details:
    """What the report shows of a candidate besides its speed."""

    samples: tuple[Sample, ...]
    acceptance_by_record: tuple[float, ...]
    step_cost: StepCost | None
    roofline: Roofline | None
    profile: Profile | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """A finished benchmark. details, configs: by candidate. ratio_interval: the meaning of a ratio's low and high."""

    machine: dict[str, Any]
    versions: dict[str, str]
    input: str | None
    runs: tuple[Run, ...]
    ratios: tuple[Ratio, ...]
    ratio_interval: str
    details: dict[str, Details | None]
    configs: dict[str, dict[str, Any]]
    notes: tuple[str, ...]
    quality: dict[str, Quality] = field(default_factory=dict)  # by candidate, if records have references

    @property
    def names(self) -> list[str]:
        """The candidates, in the order given."""
        return list(dict.fromkeys(run.name for run in self.runs))

    def runs_of(self, name: str) -> list[Run]:
        """Return the passes of a candidate."""
        return [run for run in self.runs if run.name == name]

    def typical(self, name: str) -> Run:
        """Return a candidate's passes as one: the first, with medians of what varies and the fewest identical."""
        runs = self.runs_of(name)
        identical = [run.identical for run in runs if run.identical is not None]
        medians: dict[str, Any] = {figure: _median([getattr(run, figure) for run in runs]) for figure in VARYING}
        for times in ("latency_s", "time_to_first_token_s"):
            medians[times] = _median_of_each([found for run in runs if (found := getattr(run, times)) is not None])
        return replace(runs[0], **medians, identical=min(identical, default=None))

    @property
    def has_energy(self) -> bool:
        """Whether the machine told the joules of any pass."""
        return any(run.energy_j is not None for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """Return the content of results.json, each run's name first."""
        runs = [{"name": run.name, **asdict(run)} for run in self.runs]
        absent = {"energy_j"}  # where the machine does not tell
        return asdict(self) | {
            "runs": [
                {key: value for key, value in run.items() if key not in absent or value is not None} for run in runs
            ]
        }


def _median_of_each(passes: Sequence[Percentiles]) -> Percentiles | None:
    """Return the median over passes of each percentile."""
    return Percentiles(*map(median, zip(*map(astuple, passes), strict=True))) if passes else None


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def parse(kind: type[T], value: Any) -> T:
    """Return a JSON value as a `kind`; unknown keys are dropped. Raises ValidationError."""
    return TypeAdapter(kind).validate_python(value)


def read_results(folder: Path) -> Results:
    """Return the results in a folder. Raises ConfigError."""
    path = folder / NAME
    try:
        return parse(Results, loads(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the folder of a finished benchmark") from None
    except JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"{path}: {key}: {first['msg']}; not the results of `ragspec benchmark`, or from an older one; run it again"
        ) from None
