"""`generate(config) -> RunSummary`: one run, from input rows to output lines and their statistics."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ragspec.config.io import InputConfig
from ragspec.config.redaction import revealed
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.inputs.base import Source, within
from ragspec.inputs.columns import Columns
from ragspec.inputs.sources import files_of, open_source, size_of
from ragspec.inputs.storage import advising, is_url
from ragspec.outputs.journal import Journal
from ragspec.outputs.target import Target, check_name, target_of
from ragspec.run.inspect import with_columns
from ragspec.run.local import LocalPass
from ragspec.run.ordering import Say, ignore_note
from ragspec.run.record_reader import keys_of
from ragspec.run.result_writer import Observer, Report
from ragspec.run.runner_choice import choose_runner, downloads, remember
from ragspec.run.session import Session, prepare
from ragspec.run.statistics import StatisticsFile
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
    config: RunConfig,
    *,
    limit: int | None = None,
    resume: bool = True,
    retry_failed: bool = False,
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
        config: What to run, from `load_config`. It needs an `input`.
        limit: Number of lines to read; all by default. With `retry_failed`, only their records are tried again.
        resume: Skip the records that the output already answers. False moves an existing output to `NAME.1`.
        retry_failed: Drop the error lines of the output and try those records again.
        stats_path: Where the statistics go; by default `NAME.stats.json` next to the output.
        notes: Notes to put before those of the run.
        report: Called after each record with the totals so far, and the number of lines of the input (None if it is not
            known).
        observers: Objects whose `answered` and `failed` are called with each record, once its line is written.
        progress: Show a bar, in a notebook too.
        say: Called with a line of text about what `prompt.order` saves, before anything is answered.
        metrics: Serve figures for Prometheus here while the run lasts: a port of this machine, or HOST:PORT.
        tracing: Make OpenTelemetry spans of the run and its records.

    Returns:
        The totals of this run.

    Raises:
        ConfigError: The config, the input or the output is not usable.
        ModelError: The model or its backend could not start, or stopped working.
    """
    if config.input is None:
        raise ConfigError("input: missing; set it in the config, or give --input FILE (- for stdin)")
    with config.redactor().over_errors(), ExitStack() as stack:
        config, read_as = with_columns(config)
        assert config.input is not None
        reports = [report] if report else []
        if progress:
            reports.append(stack.enter_context(_bar()))
        check_name(config.output)
        target = target_of(config.output)
        with advising("--input takes a file of records, or - for stdin", revealed(config.input.path)):
            _check_paths(target, config.input, stats_path)
            source = stack.enter_context(open_source(config.input))
        if names := getattr(source, "names", []):  # of a table, and so of every row
            Columns(config.input.columns.given).check_prompts(names, str(config.input), config.prompt.source)
        watchers: list[MetricsServer | RunTrace] = []
        for each in _watchers(config, metrics, tracing, say):
            stack.enter_context(each)
            watchers.append(each)
        count = source.count()
        began = target.state.began_by() if target and resume and target.begun() else None
        session = prepare(config, choose_runner(config, count, began, limit=limit))
        statistics = stack.enter_context(StatisticsFile(stats_path, target))
        reports += [statistics.report, *(each.report for each in watchers)]
        journal = stack.enter_context(
            Journal(
                config.output,
                session.identity(),
                order=config.order,
                resume=resume,
                retry_failed=retry_failed,
                partial=limit is not None,
                among=_keys(config, limit) if retry_failed and limit is not None else None,
            )
        )
        executor = _executor(
            session,
            source,
            journal,
            limit=limit,
            total=within(limit, count),
            report=_all_of(reports),
            observers=[*watchers, *observers],
            say=say,
        )
        summary = statistics.summary = executor.summary
        summary.notes += [*(notes or []), *read_as, *journal.notes()]
        downloaded = downloads(session.config)
        try:
            executor.answer()
        finally:
            summary.notes += [note for note in session.notes() if note not in summary.notes]
            summary.about = executor.about() | session.choice.about(summary.load_s + summary.generate_s)
            remember(session.config, summary, downloaded=downloaded)
            summary.totals = journal.totals(summary)
    return summary


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


def _keys(config: RunConfig, limit: int) -> set[str]:
    """Return the keys of the first `limit` rows; their error lines are dropped so that they are retried."""
    assert config.input is not None
    again = config.input.format == "dataset" or any(map(is_url, config.input.path))
    if size_of(config.input) is None and not again:
        raise ConfigError("--retry-failed with --limit reads its input twice; give a file with --input")
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
            f"{target.name}: lies in the input's folder, and would be read as records; choose another --output"
        )
    if target.is_folder and (inside := next((path for path in read if _is_in(_place(path), place)), None)):
        raise ConfigError(f"{target.name}: the input {inside} lies in it; choose another --output")


def _place(path: str) -> str:
    return path.rstrip("/") if is_url(path) else os.path.realpath(path)


def _is_in(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}/")
