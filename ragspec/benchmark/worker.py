"""The process of one candidate: it loads once, then runs a pass over the input on each "go" (see process.py).

A pass is the ordinary pipeline, so it times what `ragspec generate` does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ragspec.benchmark.details import acceptance_by_record, roofline, samples
from ragspec.benchmark.passes import read_answers
from ragspec.benchmark.process import DETAILS, PROFILE, Ready, Task
from ragspec.benchmark.results import Details, Pass, Profile, StepCost, parse
from ragspec.config.load import build_config
from ragspec.config.run import RunConfig
from ragspec.config.sections import ScaleConfig
from ragspec.errors import RagspecError
from ragspec.inputs.base import Source, within
from ragspec.inputs.sources import open_source
from ragspec.json_text import dumps, loads
from ragspec.outputs.journal import Journal
from ragspec.run.local import LocalPass
from ragspec.run.session import Session, prepare
from ragspec.runners.base import Runner
from ragspec.stats import RunSummary

if TYPE_CHECKING:
    from ragspec.run.ray.worker_pool import WorkerPool

Say = Callable[[Any], None]
PR_SET_PDEATHSIG = 1  # in <sys/prctl.h>
STORES = ("prefix_store", "prefix_store_gb")  # of runner_args


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """Run one task: load, report Ready, then obey `source` until it ends."""

    def send(message: dict[str, Any]) -> None:
        sink.write(dumps(message) + b"\n")
        sink.flush()

    try:
        task = parse(Task, loads(source.readline()))
        config = build_config(without_store(task.config), task.name)
        with config.redactor().over_errors():
            _answer(config, task, source, lambda value: send({"value": value}))
    except RagspecError as error:
        send({"error": str(error), "exit_code": error.exit_code})


def without_store(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config that keeps nothing for later passes: each is to compute what the first one does."""
    args = {key: value for key, value in raw.get("runner_args", {}).items() if key not in STORES}
    return raw | {"runner_args": args}


def _answer(config: RunConfig, task: Task, source: IO[bytes], say: Say) -> None:
    """Load the config's model, and obey `source`."""
    session = prepare(config)
    if config.scale is not None:
        _answer_on_workers(session, config.scale, task, source, say)
        return
    runner, output = session.runner, Path(task.output)
    started = time.perf_counter()
    with runner:
        load_s = time.perf_counter() - started
        started = time.perf_counter()
        runner.warm_up(_records(config, task.limit))
        warmup_s = time.perf_counter() - started
        say(Ready(session.about(), load_s, warmup_s, tuple(session.notes()), runner.remembers))
        for command in source:
            if command.strip() in (DETAILS, PROFILE):
                found = details(runner, output)
                if command.strip() == PROFILE:  # last, since profiled steps are slower and would skew the step cost
                    found = replace(found, profile=_profile(session, output, task.limit))
                say(found)
            else:
                say(_run_pass(session, output, task.limit))


def _answer_on_workers(session: Session, scale: ScaleConfig, task: Task, source: IO[bytes], say: Say) -> None:
    """Do the same on workers, which report neither step costs nor profiles."""
    from ragspec.run.ray.worker_pool import WorkerPool

    started = time.perf_counter()
    with WorkerPool(session, scale, details=True) as pool:
        pool.start_workers(_records(session.config, task.limit))
        load_s = time.perf_counter() - started
        about = {**session.about(), **pool.about}
        say(Ready(about, load_s, 0.0, (*session.notes(), *pool.notes), session.runner.remembers))
        for command in source:
            if command.strip() in (DETAILS, PROFILE):
                say(details(session.runner, Path(task.output)))
            else:
                say(_run_pass(session, Path(task.output), task.limit, pool))


def _records(config: RunConfig, limit: int | None) -> int | None:
    """Return how many records a pass answers, None if unknown."""
    assert config.input is not None
    with open_source(config.input) as rows:
        return within(limit, rows.count())


def _run_pass(session: Session, output: Path, limit: int | None, pool: WorkerPool | None = None) -> Pass:
    """Answer the whole input into `output`, as `ragspec generate` does, and return the figures."""
    output.unlink(missing_ok=True)
    assert session.config.input is not None
    with open_source(session.config.input) as rows, Journal(str(output)) as journal:
        summary = _stream(session, rows, journal, limit, pool)
    stats = summary.to_json()
    # read after the pass, since a runner may choose its batch size by the records
    batch_size = (pool.about.get("runner", {}) if pool else session.runner.about()).get("batch_size")
    energy_j = stats.get("energy", {}).get("answering_j")
    notes = (*session.notes(), *(pool.notes if pool else ()))  # a drafter may have failed in this pass
    more = {"batch_size": batch_size, "energy_j": energy_j, "notes": notes}
    more["acceptance_rate"] = summary.spec.acceptance_rate  # with all its digits, since it is rounded once more
    return parse(Pass, stats | stats["speculation"] | more)


def _stream(session: Session, rows: Source, journal: Journal, limit: int | None, pool: WorkerPool | None) -> RunSummary:
    if pool is not None:
        from ragspec.run.ray.driver import RayPass

        shared = RayPass(session, pool, rows, journal, limit=limit)
        shared.stream()
        return shared.summary
    executor = LocalPass(session, rows, journal, limit=limit, keep_details=True)
    for _ in executor.stream():
        pass
    return executor.summary


def _profile(session: Session, output: Path, limit: int | None) -> Profile | None:
    """Profile one more pass; None if the runner has no profiler."""
    ran = session.runner.about()
    best = roofline(ran["device"], ran["dtype"]) if "device" in ran and "dtype" in ran else None
    watched = session.runner.watched(best.bytes_per_s, best.flops_per_s) if best else None
    if watched is None:
        return None
    drafted_before = session.runner.about().get("drafting_s") or 0.0
    with watched:
        seconds = _run_pass(session, output, limit).generate_s
    drafting_s = (session.runner.about().get("drafting_s") or 0.0) - drafted_before
    return parse(Profile, {"seconds": seconds, "drafting_s": drafting_s, "phases": watched.to_json()})


def details(runner: Runner, output: Path) -> Details:
    """Return what the report shows besides speeds; none of it is timed."""
    ran = runner.about()
    answers = list(read_answers(output).answered.values())
    cost = ran.get("step_cost")
    return Details(
        samples=samples(answers, runner.tokenizer),
        acceptance_by_record=acceptance_by_record(answers),
        step_cost=None if cost is None else parse(StepCost, cost),
        roofline=None if cost is None else roofline(ran["device"], ran["dtype"]),
    )


def _end_with_parent() -> None:
    """Have the system end this process if its parent is killed: it reads of that only after its pass."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _end_with_parent()
    # libraries may print to stdout, so keep the real one for our own lines
    private = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, private)
