"""`generate(config) -> RunSummary`: one run, from rows to output lines and the statistics beside them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.inputs.base import within
from ragspec.inputs.files import files_of
from ragspec.inputs.opening import open_source
from ragspec.outputs.journal import Journal
from ragspec.outputs.runstate import PENDING, STATE, STATISTICS, began_by, check_writable, sibling, write_json
from ragspec.run.choice import choose
from ragspec.run.experience import remember
from ragspec.run.local import LocalPass, Report
from ragspec.run.session import prepare
from ragspec.stats import RunSummary


def generate(
    config: RunConfig,
    *,
    limit: int | None = None,
    resume: bool = True,
    retry_failed: bool = False,
    stats_path: str | None = None,
    notes: list[str] | None = None,
    report: Report | None = None,
) -> RunSummary:
    """Answer every record of `config.input` into `config.output` and return the totals.

    limit: read only this many lines. report: called as records finish. Raises ConfigError and ModelError.
    """
    if config.input is None:
        raise ConfigError("input: missing; set it in the config, or give --input FILE (- for stdin)")
    if retry_failed and limit is not None:
        raise ConfigError("--retry-failed drops all error lines: it cannot be combined with --limit")
    _check_paths(config, config.input.path, stats_path)
    with config.veil().over_errors(), ExitStack() as stack:
        source = stack.enter_context(open_source(config.input))
        count = source.count()
        began = began_by(config.output) if resume else None
        session = prepare(config, choose(config, count, began, limit=limit))
        if stats_path:
            check_writable(Path(stats_path), "--stats")
        journal = stack.enter_context(
            Journal(
                config.output,
                session.identity(),
                order=config.order,
                resume=resume,
                retry_failed=retry_failed,
                partial=limit is not None,
            )
        )
        executor = LocalPass(session, source, journal, limit=limit, total=within(limit, count), report=report)
        summary = executor.summary
        summary.notes += notes or []
        try:
            executor.answer()
        finally:
            summary.notes += [note for note in session.notes() if note not in summary.notes]
            summary.about = session.about()
            remember(session.config, summary)
            _write_stats(summary, Path(stats_path) if stats_path else None, journal)
    return summary


def _check_paths(config: RunConfig, inputs: list[str], stats_path: str | None) -> None:
    """Raise ConfigError if one file would have two uses. The files beside the output count too."""
    read = files_of(inputs)
    uses: dict[str, str | None] = {f"the input {name}" if len(read) > 1 else "the input": name for name in read}
    uses |= {"output": config.output, "--stats": stats_path}
    if config.output != "-":
        uses["the run's state"] = str(sibling(config.output, STATE))
        uses["the file of waiting answers"] = str(sibling(config.output, PENDING))
        if stats_path is None:
            uses["the statistics"] = str(sibling(config.output, STATISTICS))
    folders = [Path(path).resolve() for path in inputs if Path(path).is_dir()]
    if config.output != "-" and any(folder in Path(config.output).resolve().parents for folder in folders):
        raise ConfigError(
            f"{config.output}: lies in the input's folder, and would be read as records; choose another --output"
        )
    taken: dict[Path, str] = {}
    for use, name in uses.items():
        if name is None or name == "-" or name.startswith("/dev/"):
            continue
        other = taken.setdefault(Path(name).resolve(), use)
        if other != use:
            raise ConfigError(f"{name} would be both {other} and {use}; choose another --output")


def _write_stats(summary: RunSummary, path: Path | None, journal: Journal) -> None:
    """Write the stats file. A run that found everything finished keeps the file of the run that did the work."""
    idle = not (summary.records or summary.failed)
    if path is None and journal.resumable:
        path = sibling(journal.output, STATISTICS)
        if idle and path.exists():
            return
    if path is not None:
        try:
            write_json(path, summary.to_json())
        except OSError as error:
            summary.notes.append(f"{path}: the statistics cannot be written ({error.strerror})")
