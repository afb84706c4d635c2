"""What a run will take, before weights load: `ragspec plan`; and afterwards, how right that was.

    plan = make_plan(config, prices=[Price.of("2.5/h")])

Prompts are built for all records, or for a sample of them. How long answers get, and how long tokens take, is known
from earlier runs on this machine (runner_choice.py) or from a sample that is answered. Without either, it is a guess,
which the interval says. Limit: a sample smaller than a batch is slower than a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from ragspec.config.run import RunConfig
from ragspec.config.sections import SpeculationConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.host.cache import JsonCache
from ragspec.host.machine import has_gpu
from ragspec.inputs.feed import Feed
from ragspec.inputs.sources import MemorySource, open_source
from ragspec.outputs.answers import FailedRecord, RecordInFlight
from ragspec.outputs.base import MemorySink
from ragspec.outputs.journal import Journal
from ragspec.outputs.ledger import Ledger
from ragspec.outputs.target import opening_errors, target_of
from ragspec.retrieval.stage import Stage
from ragspec.run.answering import RecordTask, with_contexts
from ragspec.run.doctor import memory_needs, passage_shares
from ragspec.run.local import LocalPass
from ragspec.run.price import Price
from ragspec.run.record_reader import RecordReader
from ragspec.run.request_builder import RequestBuilder
from ragspec.run.runner_choice import (
    LOADING_S,
    TOKEN_S,
    Timing,
    asks_of,
    check_model,
    choose_for_input,
    median_by_tokens,
    remember,
    setting_of,
    timing_of,
    timings,
)
from ragspec.run.session import Session, prepare
from ragspec.speculation.methods import HF
from ragspec.stats import RunSummary

DIGITS = 6  # of a figure for programs
SAMPLED = 500  # records whose prompts are built
Z = 1.96  # standard errors in a 95% interval
TOO_LONG = "the prompt has "  # in the errors of the prompt builder
GUESS = 4.0  # factor of the interval around a guess
NOISE = 0.2  # of a time measured here before
LINE_BYTES, TOKEN_BYTES = 540, 4.6  # of an output line without its answer; of a token of text
NEARLY_ALL = 0.8  # of the planned records: fewer are too few to compare with the plan
PLANS = JsonCache("plans")  # the latest plan of a config and input


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95% interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Estimate:
        """Return the figure and its interval, multiplied."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def plus(self, other: Estimate) -> Estimate:
        """Return the sum of two figures and of their ends."""
        return Estimate(self.value + other.value, self.low + other.low, self.high + other.high)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a plan: `value` with its interval, None where it is not a number; and what it is based on."""

    what: str
    value: float | str
    low: float | None = None
    high: float | None = None
    basis: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will take. notes: for the user."""

    lines: list[Line]
    notes: list[str]

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines as rows of a table."""
        return [
            {
                "what": line.what,
                "expected": line.value if isinstance(line.value, str) else _rounded(line.value),
                "low": _rounded(line.low),
                "high": _rounded(line.high),
                "by": line.basis,
            }
            for line in self.lines
        ]


def _rounded(value: float | None) -> float | None:
    """Return a figure without the digits of binary fractions."""
    return value if value is None or value == round(value) else float(f"{value:.{DIGITS}g}")


def make_plan(
    config: RunConfig,
    *,
    limit: int | None = None,
    sample: int | None = None,
    prices: Sequence[Price] = (),
) -> Plan:
    """Return the plan of a run. sample: answer so many records first, to measure. Raises ConfigError and ModelError."""
    if config.input is None:
        raise ConfigError("input: missing; set it in the config, or give --input FILE")
    if config.input.is_stdin and config.input.format != "dataset":
        raise ConfigError("plan reads its input before the run does; give a file with --input")
    with config.redactor().over_errors():
        check_model(config)
        choice = choose_for_input(config, limit)
        session = prepare(config, choice)
        read = _read(session, limit)
        measured = _answer_sample(session, read, sample) if sample and read.tasks else None
        return _plan(session, read, measured, prices, choice.why)


# -- the input -------------------------------------------------------------------------------------


class _Read:
    """The rows of an input: how many are to be answered, and a fair sample of them."""

    def __init__(self, ledger: Ledger) -> None:
        self.records = self.finished = self.bad = 0
        self.tasks: list[RecordTask] = []
        self._ledger = ledger
        self._random = Random(0)

    def has(self, index: int, key: str) -> bool:
        found = key in self._ledger
        self.finished += found
        return found

    def has_another(self, record_id: str) -> bool:
        return False

    def fail(self, index: int, failed: FailedRecord) -> None:
        self.bad += 1

    def add(self, task: RecordTask) -> None:
        """Count a record, and sample it (Vitter's algorithm R)."""
        self.records += 1
        if len(self.tasks) < SAMPLED:
            self.tasks.append(task)
        elif (slot := self._random.randrange(self.records)) < SAMPLED:
            self.tasks[slot] = task


def _read(session: Session, limit: int | None) -> _Read:
    config = session.config
    assert config.input is not None
    read = _Read(_finished(config))
    with open_source(config.input) as source:
        reader = RecordReader(config, read, source)
        for row in Feed(source, limit):
            for task in reader.tasks(row):
                read.add(task)
    read.tasks.sort(key=lambda task: task.index)
    if session.retriever is not None:
        tasks = Stage(session.retriever, lambda task: task.query, with_contexts).fill(read.tasks)
        read.tasks = list(tasks)
        tasks.close()
    return read


def _finished(config: RunConfig) -> Ledger:
    """Return what the output answers already, nothing if another run is writing it."""
    ledger, target = Ledger(), target_of(config.output)
    if target is not None and target.begun() and target.state.is_ours():
        with suppress(ConfigError), opening_errors(target.name):
            store = target.open()
            try:
                for found in store.finished():
                    ledger.note(found)
            finally:
                store.close()
    return ledger


def _built(session: Session, tasks: Sequence[RecordTask]) -> tuple[list[RecordInFlight], list[str]]:
    """Return the records that can be answered, and why the others cannot."""
    builder, found, refused = RequestBuilder(session), [], []
    for task in tasks:
        try:
            found.append(builder.in_flight(task.index, task.record, task.key))
        except RecordError as error:
            refused.append(f"{task.record.id}: {error}")
    return found, refused


def _answer_sample(session: Session, read: _Read, count: int) -> Timing:
    """Answer records from all over the input, and return what that took. The run may learn from it as from any."""
    step = max(1, len(read.tasks) // count)
    picked = read.tasks[::step][:count]
    with MemorySource([]) as source, Journal(MemorySink()) as journal:
        pass_ = LocalPass(session, source, journal, tasks=picked)
        summary = pass_.summary
        pass_.answer()
    if not summary.records:
        raise ConfigError(f"--sample: none of {len(picked)} records could be answered; run generate to see the errors")
    remember(session.config, summary)
    return timing_of(session.config, summary)


# -- the plan --------------------------------------------------------------------------------------


def _plan(session: Session, read: _Read, measured: Timing | None, prices: Sequence[Price], why: str) -> Plan:
    config = session.config
    flights, refused = _built(session, read.tasks)
    count = round(read.records * len(flights) / max(1, len(read.tasks)))
    prompts = _total([flight.prompt_tokens for flight in flights], count)
    known = [measured] if measured else [each for each in timings(config).get(setting_of(config), []) if each.records]
    alike = [each for each in known if each.asks == asks_of(config)] or known
    basis = "a sample of this run" if measured else f"{len(alike)} earlier runs" if alike else "a guess"
    outputs = _outputs(config, flights, alike, count)
    load_s, answer_s = _seconds(config, prompts, outputs, alike)
    seconds = load_s.plus(answer_s)
    records = f"{read.finished:,} finished before, {read.bad:,} rows are not records"
    lines = [
        Line("records", read.records, basis=records),
        *_refused(refused, len(read.tasks)),
        _line("prompt tokens", prompts, f"{len(flights):,} prompts built"),
        _line("output tokens", outputs, basis),
        *_sharing(config, read, flights, prompts, alike),
        _line("hours here", seconds.times(1 / 3600), f"{basis}; {load_s.value:,.1f} s of it to load"),
    ]
    workers = config.workers() or 1
    if workers > 1:
        spread = answer_s.times(1 / workers)
        lines.append(
            _line(f"hours, {workers} workers", load_s.plus(spread).times(1 / 3600), "each on a machine like this")
        )
    lines += _memory(config, flights, alike)
    lines.append(_line("output MB", _disk(config, flights, outputs, count).times(1e-6), "before compression"))
    tokens, machine_s = prompts.plus(outputs), load_s.times(workers).plus(answer_s)
    for price in prices:
        low, value, high = (
            price.money(getattr(machine_s, each), getattr(tokens, each)) for each in ("low", "value", "high")
        )
        lines.append(Line(f"cost at {price.text}", value, low, high, "tokens" if price.unit == "mtok" else "time"))
    lines += [
        Line("runner", config.runner, basis=why.partition(": ")[2].partition(": ")[2] or "the config names it"),
        Line("method", *_method(config, flights)),
    ]
    _keep(session, count, prompts.value, outputs.value, load_s.value, answer_s.value)
    notes = [*session.notes(), session.runner.outlook()]
    if not alike:
        notes.append(
            "this machine has not run this model with these settings: --sample 16 measures instead of guessing"
        )
    return Plan(lines, notes)


def _line(what: str, found: Estimate, basis: str) -> Line:
    return Line(what, found.value, found.low, found.high, basis)


def _refused(refused: Sequence[str], tried: int) -> list[Line]:
    """Return a line about records that will fail, none if there are none. refused: why they will."""
    if not refused:
        return []
    long = sum(TOO_LONG in each for each in refused)
    what = "prompts that do not fit" if long == len(refused) else "prompts that cannot be built"
    return [Line(what, len(refused), basis=f"of {tried:,} built; they will be error lines; {refused[0]}")]


def _total(values: Sequence[float], count: int) -> Estimate:
    """Return the total of `count` values, of which these are a sample."""
    if not values:
        return Estimate(0.0, 0.0, 0.0)
    mean = sum(values) / len(values)
    unseen = max(0.0, 1 - len(values) / max(1, count))
    variance = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    off = Z * math.sqrt(variance * unseen / len(values))
    return Estimate(mean * count, (mean - off) * count, (mean + off) * count)


def _outputs(config: RunConfig, flights: Sequence[RecordInFlight], known: Sequence[Timing], count: int) -> Estimate:
    """Return the tokens of all answers: as long as earlier ones were, if there were any."""
    longest = float(sum(_most(flight) for flight in flights)) / max(1, len(flights)) * count
    records = sum(each.records for each in known)
    if not records:
        guess = min(longest, float(config.sampling.expected_tokens * count)) / 2
        return Estimate(guess, guess / GUESS, longest)
    mean = sum(each.output_tokens for each in known) / records
    variance = max(0.0, sum(each.output_squares for each in known) / records - mean**2)
    off = Z * math.sqrt(variance * (1 / records + 1 / max(1, count)))
    return Estimate(*(max(0.0, min(longest, (mean + each) * count)) for each in (0.0, -off, off)))


def _most(flight: RecordInFlight) -> int:
    return flight.sampling.max_new_tokens * flight.n * len(flight.prompts)


def _seconds(
    config: RunConfig, prompts: Estimate, outputs: Estimate, known: Sequence[Timing]
) -> tuple[Estimate, Estimate]:
    """Return the seconds of loading and warming up, and those of answering."""
    if not known:
        kind, runner = "GPU" if has_gpu() else "CPU", config.runner if config.runner in LOADING_S else HF
        guess = (prompts.value + outputs.value) * TOKEN_S[kind][runner]
        load = float(LOADING_S[runner])
        return tuple(Estimate(each, each / GUESS, each * GUESS) for each in (load, guess))  # type: ignore[return-value]
    loads = sorted((each.load_s or 0.0) + each.warmup_s for each in known)
    found = sorted((_one(each, prompts.value, outputs.value), each.tokens) for each in known)
    answering = _range(median_by_tokens(found), [seconds for seconds, _ in found])
    return _range(loads[len(loads) // 2], loads), answering


def _range(value: float, measured: Sequence[float]) -> Estimate:
    """Return a time with the range of earlier ones, at least NOISE to both sides."""
    return Estimate(value, min(measured[0], value * (1 - NOISE)), max(measured[-1], value * (1 + NOISE)))


def _one(timing: Timing, prompts: float, outputs: float) -> float:
    """Return the seconds that these tokens take at the speed of an earlier run."""
    prompted = timing.tokens - timing.output_tokens
    counted = timing.prefill_s + timing.decode_s
    if not (counted and prompted and timing.output_tokens):
        return timing.generate_s / max(1, timing.tokens) * (prompts + outputs)
    rest = timing.generate_s / counted  # what neither phase has, in proportion
    return rest * (timing.prefill_s / prompted * prompts + timing.decode_s / timing.output_tokens * outputs)


def _sharing(
    config: RunConfig, read: _Read, flights: Sequence[RecordInFlight], prompts: Estimate, known: Sequence[Timing]
) -> list[Line]:
    """Return what prompts with equal beginnings save."""
    lines = []
    prompted = sum(each.tokens - each.output_tokens for each in known)
    if prompted:
        share = sum(each.cached_tokens for each in known) / prompted
        lines.append(Line("prompt tokens shared", share * prompts.value, basis=f"{share:.0%} in earlier runs"))
    elif len(flights) > 1:
        heads = [flight.prompt.token_ids for flight in flights]
        common = next(
            (at for at, tokens in enumerate(zip(*heads, strict=False)) if len(set(tokens)) > 1), min(map(len, heads))
        )
        lines.append(
            Line("prompt tokens shared", common * (read.records - 1), basis=f"all prompts begin with {common} tokens")
        )
    window = [task.record for task in read.tasks[: config.prompt.order_window]]
    if shares := passage_shares(config, window):
        said = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        lines.append(Line("passages computed", f"{shares.get(config.prompt.order, shares['rank']):.0%}", basis=said))
    return lines


def _memory(config: RunConfig, flights: Sequence[RecordInFlight], known: Sequence[Timing]) -> list[Line]:
    lines = []
    if known and (peak := max(each.peak_gib for each in known)):
        lines.append(Line("memory GiB", peak, basis="peak of earlier runs"))
    needs = memory_needs(config) if config.model is not None and config.runner in LOADING_S else None
    if needs is not None:
        weights, per_token, free = (each / (1 << 30) for each in needs)
        longest = max((flight.prompt_tokens + _most(flight) for flight in flights), default=0)
        fits = "fits" if free > weights + per_token * longest else "does not fit"
        basis = f"weights {weights:.2f}, {per_token * longest:.2f} for the longest record; {free:.1f} free: {fits}"
        lines.append(Line("memory GiB, at least", weights + per_token * longest, basis=basis))
    return lines


def _disk(config: RunConfig, flights: Sequence[RecordInFlight], outputs: Estimate, count: int) -> Estimate:
    """Return the bytes of the output's lines."""
    include = config.output.include

    def size(flight: RecordInFlight) -> int:
        passages = sum(len(passage.text) for passage in flight.prompt.kept) if "contexts" in include else 0
        query = len(flight.record.query or "") if "query" in include else 0
        return LINE_BYTES + len(str(flight.record.metadata)) + passages + query

    return Estimate(*(
        sum(map(size, flights)) / max(1, len(flights)) * count + TOKEN_BYTES * tokens
        for tokens in (outputs.value, outputs.low, outputs.high)
    ))  # fmt: skip


def _method(config: RunConfig, flights: Sequence[RecordInFlight]) -> tuple[str, None, None, str]:
    """Return the method that the run will use, and which one should be fastest, as far as that is known."""
    own = config.speculation.method
    given = "method" in config.speculation.model_fields_set
    said = "as configured" if given else "the default"
    speeds: dict[str, float] = {}
    for method in ("none", "context", "prompt_lookup", "auto", config.speculation.method):
        changed = config.model_copy(update={"speculation": _with_method(config, method)})
        runs = [each for each in timings(changed).get(setting_of(changed), []) if each.asks == asks_of(config)]
        if tokens := sum(each.tokens for each in runs):
            speeds[method] = sum(each.generate_s for each in runs) / tokens
    if len(speeds) > 1:
        best = min(speeds, key=lambda method: speeds[method])
        measured = ", ".join(f"{method} {1000 * token_s:.2f}" for method, token_s in speeds.items())
        fastest = "the fastest" if best == own else f"{best} was faster"
        return own, None, None, f"{said}; {fastest}, in ms a token in earlier runs: {measured}"
    if not any(flight.prompt.kept for flight in flights):
        return own, None, None, f"{said}; there are no passages to copy from; ragspec tune compares all methods"
    try_auto = "" if own == "auto" else "auto measures while it answers, and "
    return own, None, None, f"{said}; not compared here: {try_auto}ragspec tune compares all methods"


def _with_method(config: RunConfig, method: str) -> SpeculationConfig:
    """Return the speculation section with another method."""
    section = config.speculation
    return section if method == section.method else SpeculationConfig(method=method)


# -- afterwards ------------------------------------------------------------------------------------


def _place(session: Session) -> tuple[object, ...]:
    return repr(session.identity()), str(session.config.input), session.config.workers()


def _keep(session: Session, records: int, prompts: float, outputs: float, load_s: float, answer_s: float) -> None:
    kept: dict[str, float | str] = {"records": records, "prompt_tokens": prompts, "output_tokens": outputs}
    kept |= {"load_s": load_s, "answer_s": answer_s, "output": str(session.config.output)}
    PLANS.write(kept, *_place(session))


def compared(session: Session, summary: RunSummary) -> str:
    """Return what the latest plan said of a run beside what it took; "" without a plan, or with too few answers."""
    plan = PLANS.read(*_place(session))
    try:
        names = ("records", "prompt_tokens", "output_tokens", "load_s", "answer_s")
        said = {name: float(plan[name]) for name in names}
        output = str(plan["output"])
    except (TypeError, KeyError, ValueError):
        return ""
    if output not in ("-", str(session.config.output)):  # - if the plan was not told where answers will go
        return ""
    share = summary.records / said["records"] if said["records"] else 0.0
    if share < NEARLY_ALL:
        return ""
    took = {
        "prompt tokens": (summary.prompt_tokens, said["prompt_tokens"] * share),
        "output tokens": (summary.output_tokens, said["output_tokens"] * share),
        "time": (summary.load_s + summary.warmup_s + summary.generate_s, said["load_s"] + said["answer_s"] * share),
    }
    part = "" if share == 1 else f", for {share:.0%} of the planned records"
    off = [f"{name} {value / expected - 1:+.0%}" for name, (value, expected) in took.items() if expected]
    return f"compared with it, this took: {', '.join(off)}{part}"
