"""Running a plan: one process per candidate, passes in turn (A B, B A, ...).

Limit: passes in turn need room for all candidates' models at once; `sequential` gives that up.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from ragspec.benchmark.answers import fingerprints
from ragspec.benchmark.passes import Entry, Passes
from ragspec.benchmark.plan import Candidate, check_input
from ragspec.benchmark.process import Worker, open_worker
from ragspec.benchmark.results import NAME, Results
from ragspec.benchmark.summary import summarise
from ragspec.errors import ConfigError
from ragspec.outputs.documents import write_json


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
    """Run `plan` and return what `folder`/results.json then holds. Raises ConfigError and ModelError.

    resume: keep the passes that an interrupted run of the same plan left in `folder`. profile: watch one more pass of
    each candidate, and say where its time goes. restart: have each pass in a new process.
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
    """The passes of a plan: those that are done, and how the others are run."""

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
        """Run what is left, all models in memory: each pass of a pair then sees the same machine."""
        with ExitStack() as stack:
            workers = [self._start(candidate, stack) for candidate in self._unfinished()]
            for number in range(1, self._repeat + 1):
                for worker in workers if number % 2 else reversed(workers):
                    self._measure(worker, number)

    def run_one_by_one(self) -> None:
        """Run what is left, one model in memory at a time."""
        for candidate in self._unfinished():
            with ExitStack() as stack:
                worker = self._start(candidate, stack)
                for number in range(1, self._repeat + 1):
                    self._measure(worker, number)

    def results(self) -> Results:
        """Return what was found."""
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
        """Run a candidate's pass `number` and keep it, unless an earlier run has done it."""
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
