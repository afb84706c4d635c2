"""`generate(config) -> RunSummary`: one run, from input rows to output lines and their statistics."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ragspec.config.io import InputConfig
from ragspec.config.redaction import revealed
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.inputs.base import Source, within
from ragspec.inputs.columns import Columns
from ragspec.inputs.record_ids import RecordIds
from ragspec.inputs.sources import files_of, open_source, size_of
from ragspec.inputs.storage import advising, is_url
from ragspec.outputs.journal import Journal
from ragspec.outputs.target import Target, check_name, target_of
from ragspec.outputs.update import Update, UpdatePlan, opened_update, updated_target
from ragspec.run.budget import BudgetGate
from ragspec.run.inspect import with_columns
from ragspec.run.local import LocalPass, checked_config
from ragspec.run.ordering import Say, ignore_note
from ragspec.run.plan import compared
from ragspec.run.price import Budget
from ragspec.run.record_reader import keys_of
from ragspec.run.result_writer import Observer, Report
from ragspec.run.runner_choice import check_model, choose_runner, downloads, remember
from ragspec.run.session import Session, prepare
from ragspec.run.statistics import StatisticsFile
from ragspec.run.update import identity_of, requests_of
from ragspec.stats import RunSummary

if TYPE_CHECKING:
    from ragspec.run.metrics import MetricsServer
    from ragspec.run.tracing import RunTrace


class Executor(Protocol):
    """Answers a source into a journal, in this process or on workers."""

    summary: RunSummary

    def answer(self) -> None:
        """Answer all records. Raises ConfigError and ModelError."""

    def about(self) -> dict[str, Any]:
        """Return what identifies the run in its statistics."""


def generate(
    config: RunConfig | Mapping[str, Any] | str | PathLike[str],
    *,
    limit: int | None = None,
    resume: bool = True,
    retry_failed: bool = False,
    update: bool = False,
    prune: bool = False,
    keep_old: bool = False,
    budget: Budget | Sequence[Budget] | None = None,
    stats_path: str | None = None,
    notes: list[str] | None = None,
    report: Report | None = None,
    observers: Sequence[Observer] = (),
    say: Say = ignore_note,
    progress: bool = False,
    metrics: int | str | None = None,
    tracing: bool = False,
) -> RunSummary:
    """Answer every record of `config.input` into `config.output`, as `ragspec generate` does.

    Args:
        config: What to run: from `load_config`, or a mapping or the path of a YAML file as it takes them. It needs an
            `input`.
        limit: Number of lines to read; all by default. With `retry_failed`, only their records are tried again.
        resume: Skip the records that the output already answers. False moves an existing output to `NAME.1`.
        retry_failed: Drop the error lines of the output and try those records again.
        update: Answer again the records whose prompt, sampling or model differs from what the output's line answers,
            and replace their lines once all are answered. All other lines stay.
        prune: With `update`, also remove the answers of records that are no longer in the input.
        keep_old: With `update`, keep the output as it was as `NAME.1`.
        budget: Stop before the output has taken more than this, or the first of these, earlier runs included;
            `summary.stopped` then says so.
        stats_path: Where the statistics go; by default `NAME.stats.json` next to the output.
        notes: Notes to put before those of the run.
        report: Called after each record with the totals so far, and the number of lines of the input (None if it is not
            known).
        observers: Objects whose `answered` and `failed` are called with each record, once its line is written.
        progress: Show a bar, in a notebook too.
        say: Called with a line of text about what `prompt.order` saves, and what an update answers, before anything is
            answered.
        metrics: Serve figures for Prometheus here while the run lasts: a port of this machine, or HOST:PORT.
        tracing: Make OpenTelemetry spans of the run and its records.

    Returns:
        The totals of this run.

    Raises:
        ConfigError: The config, the input or the output is not usable.
        ModelError: The model or its backend could not start, or stopped working.
    """
    config = checked_config(config)
    if config.input is None:
        raise ConfigError("input: missing; set it in the config, or give --input FILE (- for stdin)")
    with config.redactor().over_errors(), ExitStack() as stack:
        check_name(config.output)
        config, read_as = _with_columns(config, resume=resume)
        assert config.input is not None
        reports = [report] if report else []
        if progress:
            reports.append(stack.enter_context(_bar()))
        budgets = [budget] if isinstance(budget, Budget) else list(budget or ())
        if budgets and config.scale is not None:
            raise ConfigError("--budget works in one process only, not with the workers of `scale`; remove one of them")
        target = target_of(config.output)
        outdated = _outdated(config, resume=resume, keep_old=keep_old, prune=prune, limit=limit) if update else None
        with advising("--input takes a file of records, or - for stdin", revealed(config.input.path)):
            _check_paths(target, config.input, stats_path)
            source = stack.enter_context(open_source(config.input))
        if names := getattr(source, "names", []):  # of a table, and so of every row
            Columns(config.input.columns.given).check_prompts(names, str(config.input), config.prompt.source)
        watchers: list[MetricsServer | RunTrace] = []
        for each in _watchers(config, metrics, tracing, say):
            stack.enter_context(each)
            watchers.append(each)
        check_model(config)
        count = source.count()
        began = target.state.began_by() if target and resume and target.begun() else None
        session = prepare(config, choose_runner(config, count, began, limit=limit))
        for each in watchers:
            each.chosen(session.config)
        statistics = stack.enter_context(StatisticsFile(stats_path, target))
        reports += [statistics.report, *(each.report for each in watchers)]
        identity = identity_of(session)
        updated = None
        if outdated is not None:
            updated = stack.enter_context(
                opened_update(outdated, identity, retry_failed=retry_failed, keep_old=keep_old)
            )
            say(str(_matched(updated, session, limit=limit, prune=prune)))
        journal = stack.enter_context(
            Journal(
                config.output,
                identity,
                order=config.order,
                resume=resume,
                retry_failed=retry_failed,
                partial=limit is not None,
                among=_keys(config, limit) if retry_failed and limit is not None else None,
                update=updated,
            )
        )
        gate = BudgetGate(budgets, journal.ledger, journal.spent) if budgets else None
        executor = _executor(
            session,
            source,
            journal,
            limit=limit,
            total=within(limit, count),
            report=_all_of(reports),
            observers=[*watchers, *observers],
            say=say,
            **({"gate": gate} if gate else {}),
        )
        summary = statistics.summary = executor.summary
        summary.notes += [*(notes or []), *read_as, *journal.notes()]
        downloaded = downloads(session.config)
        statistics.begin(within(limit, count))
        try:
            executor.answer()
            if gate is not None and gate.stopped:
                journal.stop_early()
                summary.stopped = gate.why
            summary.planned = compared(session, summary)
        finally:
            summary.notes += [note for note in session.notes() if note not in summary.notes]
            if updated is not None and not updated.complete:
                summary.notes.append(f"{updated.target.name} is unchanged: the next --update continues the update")
            summary.about = executor.about() | session.choice.about(summary.load_s + summary.generate_s)
            remember(session.config, summary, downloaded=downloaded)
            summary.totals = journal.totals(summary)
    return summary


def _with_columns(config: RunConfig, *, resume: bool = True) -> tuple[RunConfig, list[str]]:
    """Return the config with its input's columns read by their names, or as the output's lines were."""
    target = target_of(config.output) if resume else None
    return with_columns(config, target.state.columns() if target is not None else {})


def _watchers(
    config: RunConfig, metrics: int | str | None, tracing: bool, say: Say
) -> Iterator[MetricsServer | RunTrace]:
    """Yield what shows the run to other programs. Raises ConfigError."""
    if metrics is not None:
        from ragspec.run.metrics import MetricsServer

        yield (server := MetricsServer(metrics, config))
        say(f"metrics at {server.url}")
    if tracing:
        from ragspec.run.tracing import RunTrace

        yield RunTrace(config)


def _all_of(reports: Sequence[Report]) -> Report:
    def report(summary: RunSummary, total: int | None) -> None:
        for each in reports:
            each(summary, total)

    return report


@contextmanager
def _bar() -> Iterator[Report]:
    """Yield what moves a progress bar, which a notebook shows as its own."""
    from tqdm.auto import tqdm

    with tqdm(unit="record", disable=False) as bar:

        def report(summary: RunSummary, total: int | None) -> None:
            bar.total = total
            bar.n = summary.records + summary.failed + summary.skipped
            bar.refresh()

        yield report


def dry_update(config: RunConfig, *, limit: int | None, retry_failed: bool, prune: bool) -> UpdatePlan:
    """Return what `generate` with `update` would answer. Loads no weights and writes nothing. Raises ConfigError."""
    config = checked_config(config)
    if config.input is None:
        raise ConfigError("input: missing; set it in the config, or give --input FILE")
    with config.redactor().over_errors():
        config, _ = _with_columns(config)
        assert config.input is not None
        outdated = _outdated(config, prune=prune, limit=limit)
        began = outdated.state.began_by() if outdated else None
        with open_source(config.input) as source:
            session = prepare(config, choose_runner(config, source.count(), began, limit=limit))
        if outdated is None:
            with open_source(config.input) as source:
                ids = RecordIds(source)
                return UpdatePlan(again=[(ids.of(row), "new") for row in islice(source, limit)])
        with opened_update(outdated, identity_of(session), retry_failed=retry_failed, dry=True) as update:
            return _matched(update, session, limit=limit, prune=prune)


def _outdated(
    config: RunConfig, *, prune: bool, limit: int | None, resume: bool = True, keep_old: bool = False
) -> Target | None:
    """Return the output to update, None if it has no lines yet. Raises ConfigError if it cannot be updated."""
    if prune and limit is not None:
        raise ConfigError("--prune cannot be combined with --limit, which hides part of the input")
    if not resume:
        raise ConfigError("--update keeps the output, and --no-resume starts a new one; give only one of them")
    target = updated_target(config.output)
    if keep_old and target is not None and (target.is_folder or Path(target.address).is_dir()):
        raise ConfigError("--keep-old only works for an output that is one file; copy the folder first")
    _check_twice(config, "--update")
    return target


def _matched(update: Update, session: Session, *, limit: int | None, prune: bool) -> UpdatePlan:
    """Find which lines of an output still answer their records."""
    assert session.config.input is not None
    with open_source(session.config.input) as source:
        rows = requests_of(session, source, update, limit, prune=prune)
    return update.match(rows, whole=limit is None, prune=prune)


def _check_twice(config: RunConfig, flag: str) -> None:
    """Raise ConfigError if the input cannot be read twice."""
    assert config.input is not None
    again = config.input.format == "dataset" or any(map(is_url, config.input.path))
    if size_of(config.input) is None and not again:
        raise ConfigError(f"{flag} reads its input twice; give a file with --input")


def _keys(config: RunConfig, limit: int) -> set[str]:
    """Return the keys of the first `limit` rows; their error lines are dropped so that they are retried."""
    _check_twice(config, "--retry-failed with --limit")
    assert config.input is not None
    with open_source(config.input) as source:
        return keys_of(config, source, limit)


def _executor(session: Session, source: Source, journal: Journal, **rest: Any) -> Executor:
    """Return the executor of a session: this process, or the workers that the config asks for."""
    scale = session.config.scale
    if scale is None:
        return LocalPass(session, source, journal, **rest)
    from ragspec.run.ray.driver import RayPass
    from ragspec.run.ray.worker_pool import WorkerPool

    return RayPass(session, WorkerPool(session, scale), source, journal, **rest)


def _check_paths(target: Target | None, given: InputConfig, stats_path: str | None) -> None:
    """Raise ConfigError if one file would have two uses. Files beside the output count too."""
    read = _read(given)
    if target is not None:
        _check_places(target, given, read)
    here = [path for path in read if not is_url(path)]
    uses = [(f"the input {name}" if len(here) > 1 else "the input", Path(name)) for name in here]
    written = target.files() if target else {}
    if stats_path is not None:
        written.pop("the statistics", None)
        written["--stats"] = Path(stats_path)
    taken: dict[Path, str] = {}
    for use, path in [*uses, *written.items()]:
        if str(path).startswith("/dev/"):
            continue
        other = taken.setdefault(Path(os.path.realpath(path)), use)
        if other != use:
            raise ConfigError(f"{path} would be both {other} and {use}; choose another --output")


def _read(given: InputConfig) -> list[str]:
    """Return the input's files and URLs; empty for a dataset."""
    if given.format == "dataset":
        return []
    return [path for path in files_of(revealed(given.path), revealed(given.storage_options)) if path != "-"]


def _check_places(target: Target, given: InputConfig, read: list[str]) -> None:
    """Raise ConfigError if the output lies in the input's folder, or the input in the output's folder."""
    place = _place(target.address)
    # equal paths are left to _check_paths, which has a better message
    if any(_is_in(place, _place(path)) for path in revealed(given.path) if is_url(path) or Path(path).is_dir()):
        raise ConfigError(
            f"{target.name}: is inside the input's folder, and would be read as records; choose another --output"
        )
    if target.is_folder and (inside := next((path for path in read if _is_in(_place(path), place)), None)):
        raise ConfigError(f"{target.name}: contains the input {inside}; choose another --output")


def _place(path: str) -> str:
    return path.rstrip("/") if is_url(path) else os.path.realpath(path)


def _is_in(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}/")
