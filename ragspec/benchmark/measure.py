"""Run a benchmark plan, one process per candidate with alternating passes (A B, B A, ...), and summarise the results.

Limit: alternating passes need memory for all candidates' models at once; `sequential` gives that up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from ragspec.benchmark.comparison import graded, interval, paired
from ragspec.benchmark.passes import Entry, Passes, fingerprints
from ragspec.benchmark.plan import (
    Candidate,
    Setting,
    baseline_of,
    by_rank_of,
    check_input,
    fewest_of,
    missing,
    setting_of,
)
from ragspec.benchmark.process import Ready, Worker, answers_of, open_worker
from ragspec.benchmark.results import DECODE_SPEED, NAME, RECORD_SPEED, SPEED, Pass, Ratio, Results, Run
from ragspec.errors import ConfigError
from ragspec.host.machine import machine
from ragspec.outputs.folder import write_json


def summarise(
    plan: Sequence[Candidate], entries: Mapping[str, Entry], folder: Path, repeat: int, notes: Sequence[str]
) -> Results:
    """Return the results of `repeat` passes of every candidate. notes: appended to those of the results."""
    passes = {candidate.name: entries[candidate.name].passes[:repeat] for candidate in plan}
    ready = {candidate.name: _ready(entries[candidate.name]) for candidate in plan}
    # records in one batch, as far as the runner reports it, else as configured
    sizes = {
        candidate.name: entries[candidate.name].passes[-1].batch_size or candidate.batch_size for candidate in plan
    }
    baselines = {candidate.name: baseline_of(candidate, plan, sizes) for candidate in plan}
    settings = [setting_of(candidate, sizes) for candidate in plan]
    found = {f"{name}: {note}" for name, one in ready.items() for note in one.notes}
    found |= {f"{name}: {note}" for name, several in passes.items() for one in several for note in one.notes}
    found |= {missing(one, settings) for one in settings if baselines[one.name] is None and not one.peer}
    found |= {f"{name}: {note}" for name, several in passes.items() if (note := _failures(several))}
    runs = []
    for candidate in plan:
        name = candidate.name
        baseline = baselines[name]
        plain = None if baseline is None else entries[baseline.name].answers[0]
        for number, figures in enumerate(passes[name], 1):
            identical = None if plain is None else _identical(entries[name].answers[number - 1], plain)
            runs.append(_run(candidate, number, figures, ready[name], sizes[name], identical))
    return Results(
        machine=machine(),
        versions={key: value for one in ready.values() for key, value in one.about["versions"].items()},
        input=str(plan[0].config.input),
        runs=tuple(runs),
        ratios=tuple(ratio for candidate in plan for ratio in _ratios(candidate, baselines, plan, settings, passes)),
        ratio_interval="95%, Student's t on the logarithms of the paired ratios",
        details={candidate.name: entries[candidate.name].details for candidate in plan},
        configs={candidate.name: candidate.config.model_dump(mode="json") for candidate in plan},
        notes=(*sorted(found), *notes),
        quality=graded({one.name: answers_of(one, folder) for one in plan}, _by_rank(settings)),
    )


def _failures(passes: Sequence[Pass]) -> str:
    """Return how many records failed in the worst pass, "" if none did in any."""
    worst = max(passes, key=lambda one: one.failed)
    total = worst.records + worst.failed
    return f"{worst.failed} of {total} records failed; figures are of the others" if worst.failed else ""


def _by_rank(settings: Sequence[Setting]) -> dict[str, str]:
    """Return, for candidates with another passage order, the same candidate with passages by rank."""
    places = {setting.name: by_rank_of(setting, settings) for setting in settings}
    return {name: settings[place].name for name, place in places.items() if place is not None}


def _ready(entry: Entry) -> Ready:
    assert entry.ready is not None, "a pass comes after its process was ready"
    return entry.ready


def _run(
    candidate: Candidate, number: int, figures: Pass, ready: Ready, batch_size: int | None, identical: int | None
) -> Run:
    return Run(
        **vars(figures) | {"batch_size": batch_size},
        name=candidate.name,
        peer=candidate.peer,
        runner=candidate.config.runner,
        method=candidate.config.speculation.method,
        num_tokens=candidate.num_tokens or candidate.config.speculation.num_tokens,
        repeat=number,
        load_s=round(ready.load_s, 3),
        warmup_s=round(ready.warmup_s, 3),
        identical=identical,
        workers=candidate.config.workers(),
        order=candidate.config.prompt.order,
    )


def _ratios(
    candidate: Candidate,
    baselines: Mapping[str, Candidate | None],
    plan: Sequence[Candidate],
    settings: Sequence[Setting],
    passes: Mapping[str, Sequence[Pass]],
) -> Iterator[Ratio]:
    """Yield the candidate's ratios to its baseline, to the fewest workers, to passages by rank, and to every peer.

    A peer has none of its own.
    """
    if candidate.peer:
        return
    baseline = baselines[candidate.name]
    if baseline is not None and baseline is not candidate:
        for metric in (SPEED, DECODE_SPEED):
            yield from _ratio(candidate, baseline, metric, passes)
    fewest = fewest_of(settings[plan.index(candidate)], settings)
    if fewest is not None:
        yield from _ratio(candidate, plan[fewest], SPEED, passes)
    by_rank = by_rank_of(settings[plan.index(candidate)], settings)
    if by_rank is not None:
        yield from _ratio(candidate, plan[by_rank], RECORD_SPEED, passes)
    for peer in plan:
        if peer.peer:
            alike = peer.config.prompt.order == candidate.config.prompt.order
            yield from _ratio(candidate, peer, SPEED if alike else RECORD_SPEED, passes)


def _ratio(
    candidate: Candidate, other: Candidate, metric: str, passes: Mapping[str, Sequence[Pass]]
) -> Iterator[Ratio]:
    """Yield the ratio of a metric; nothing if no pair of passes has it."""
    ratios = paired(*([getattr(each, metric) for each in passes[name]] for name in (candidate.name, other.name)))
    if ratios:
        middle, low, high = interval(ratios)
        yield Ratio(
            name=candidate.name,
            baseline=other.name,
            metric=metric,
            median=round(middle, 4),
            low=None if low is None else round(low, 4),
            high=None if high is None else round(high, 4),
            pairs=len(ratios),
        )


def _identical(answers: Mapping[str, str], plain: Mapping[str, str]) -> int:
    """Return how many answers of a pass equal, token for token, those of plain decoding's first pass."""
    return sum(plain.get(name) == answer for name, answer in answers.items())


# -- running ---------------------------------------------------------------------------------------


def run_benchmark(
    plan: list[Candidate],
    folder: Path,
    *,
    repeat: int,
    limit: int | None,
    sequential: bool,
    console: Console,
    resume: bool = False,
    profile: bool = False,
    restart: bool = False,
) -> Results:
    """Run a plan, write `folder`/results.json and return its content.

    Args:
        plan: The candidates.
        folder: For outputs, logs and results.
        repeat: Passes per candidate.
        limit: Records per pass, None for all.
        sequential: Load one model at a time, without alternating passes.
        console: For progress.
        resume: Keep the passes that an interrupted run of the same plan left in `folder`.
        profile: Profile one more pass of each candidate.
        restart: Run each pass in a new process.

    Raises:
        ConfigError: If the input or a candidate's config cannot work.
        ModelError: If a candidate's process fails.
    """
    check_input(plan[0].config)
    benchmark = _Benchmark(plan, folder, repeat, limit, console, resume, profile, restart)
    if sequential:
        benchmark.run_one_by_one()
    else:
        benchmark.run_in_turn()
    results = benchmark.results()
    write_json(folder / NAME, results.to_json())
    return results


class _Benchmark:
    """The passes of a plan: finished ones, and how to run the rest."""

    def __init__(
        self,
        plan: list[Candidate],
        folder: Path,
        repeat: int,
        limit: int | None,
        console: Console,
        resume: bool,
        profile: bool,
        restart: bool,
    ) -> None:
        self._profile = profile
        self._restart = restart
        self._plan = plan
        self._folder = folder
        self._repeat = repeat
        self._limit = limit
        self._console = console
        self._store = Passes(folder, limit, resume)
        self._entries: dict[str, Entry] = {candidate.name: self._store.open(candidate) for candidate in plan}

    def run_in_turn(self) -> None:
        """Run the rest with all models in memory, so that each pair of passes sees the same machine."""
        with ExitStack() as stack:
            workers = [self._start(candidate, stack) for candidate in self._unfinished()]
            for number in range(1, self._repeat + 1):
                for worker in workers if number % 2 else reversed(workers):
                    self._measure(worker, number)

    def run_one_by_one(self) -> None:
        """Run the rest with one model in memory at a time."""
        for candidate in self._unfinished():
            with ExitStack() as stack:
                worker = self._start(candidate, stack)
                for number in range(1, self._repeat + 1):
                    self._measure(worker, number)

    def results(self) -> Results:
        """Return the results so far."""
        notes = []
        if self._store.kept:
            notes.append(f"passes kept from an earlier run: {self._store.kept}, timed under that run's conditions")
        if self._profile and any(
            entry.details is None or entry.details.profile is None for entry in self._entries.values()
        ):
            notes.append("no profile of passes kept from an earlier run, or of runners that cannot be profiled")
        return summarise(self._plan, self._entries, self._folder, self._repeat, notes)

    def _unfinished(self) -> list[Candidate]:
        return [candidate for candidate in self._plan if len(self._entries[candidate.name].passes) < self._repeat]

    def _start(self, candidate: Candidate, stack: ExitStack) -> Worker:
        worker = stack.enter_context(open_worker(candidate, self._folder, self._limit, self._console))
        self._entries[candidate.name].ready = worker.ready
        return worker

    def _measure(self, worker: Worker, number: int) -> None:
        """Run a candidate's pass `number` and store it, unless an earlier run has done so."""
        name = worker.candidate.name
        entry = self._entries[name]
        if len(entry.passes) >= number:
            return
        self._console.print(f"{name}: pass {number} of {self._repeat} ...", markup=False)
        figures = worker.measure(self._restart)
        if not figures.records:
            raise ConfigError(f"{name}: no record was answered ({figures.failed} failed); see {worker.answers}")
        if figures.failed:
            self._console.print(
                f"{name}: {figures.failed} records failed; see {worker.answers}", markup=False, style="yellow"
            )
        entry.passes.append(figures)
        entry.answers.append(fingerprints(worker.answers))
        if number == self._repeat:
            entry.details = worker.details(self._profile)
        self._store.save(worker.candidate)
        self._console.print(
            f"{name}: pass {number} of {self._repeat}: {describe_pass(figures, self._seconds_left())}", markup=False
        )

    def _seconds_left(self) -> float:
        """Return about how long the passes to come will take, by those that are done."""
        known = [each.generate_s for entry in self._entries.values() for each in entry.passes]
        left = 0.0
        for entry in self._entries.values():
            own = [each.generate_s for each in entry.passes] or known
            left += (self._repeat - len(entry.passes)) * sum(own) / len(own)
        return left


def describe_pass(figures: Pass, left_s: float) -> str:
    """Return a pass's result in a few words, and how long the passes to come will take."""
    parts = [f"{figures.tokens_per_s:.1f} tokens/s" if figures.tokens_per_s else "no speed"]
    if figures.acceptance_rate is not None:
        parts.append(f"{figures.acceptance_rate:.0%} of drafts accepted")
    left = f"; about {left_s / 60:.0f} min left" if left_s >= 90 else f"; about {left_s:.0f} s left" if left_s else ""
    return f"{', '.join(parts)} in {figures.generate_s:.1f} s{left}"
