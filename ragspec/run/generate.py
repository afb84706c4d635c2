"""`generate(config) -> RunSummary`: one run, from rows to output lines and the statistics beside them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ragspec.config.places import InputConfig
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.inputs.base import within
from ragspec.inputs.files import files_of
from ragspec.inputs.opening import open_source
from ragspec.inputs.storage import is_url
from ragspec.outputs.base import Document
from ragspec.outputs.journal import Journal
from ragspec.outputs.runstate import LocalDocument, check_writable
from ragspec.outputs.target import target_of
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
    _check_paths(config, config.input, stats_path)
    with config.veil().over_errors(), ExitStack() as stack:
        source = stack.enter_context(open_source(config.input))
        count = source.count()
        target = target_of(config.output)
        began = target.state.began_by() if target and resume and target.begun() else None
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


def _check_paths(config: RunConfig, given: InputConfig, stats_path: str | None) -> None:
    """Raise ConfigError if one local file would have two uses. The files beside the output count too."""
    read = [path for path in files_of([path for path in given.path if not is_url(path)]) if path != "-"]
    uses = [(f"the input {name}" if len(read) > 1 else "the input", Path(name)) for name in read]
    target = target_of(config.output)
    written = target.files() if target else {}
    if stats_path is not None:
        written.pop("the statistics", None)
        written["--stats"] = Path(stats_path)
    folders = [Path(path).resolve() for path in given.path if Path(path).is_dir()]
    if "output" in written:
        output = written["output"].resolve()
        if any(folder == output or folder in output.parents for folder in folders):
            raise ConfigError(
                f"{config.output}: lies in the input's folder, and would be read as records; choose another --output"
            )
    taken: dict[Path, str] = {}
    for use, path in [*uses, *written.items()]:
        if str(path).startswith("/dev/"):
            continue
        other = taken.setdefault(path.resolve(), use)
        if other != use:
            raise ConfigError(f"{path} would be both {other} and {use}; choose another --output")


def _write_stats(summary: RunSummary, path: Path | None, journal: Journal) -> None:
    """Write the stats file. A run that found everything finished keeps the file of the run that did the work."""
    document: Document | None = LocalDocument(path) if path else None
    if document is None and journal.target is not None:
        document = journal.target.statistics
        if not (summary.records or summary.failed) and document.read():
            return
    if document is not None:
        try:
            document.write(summary.to_json())
        except OSError as error:
            summary.notes.append(f"{document.name}: the statistics cannot be written ({error.strerror})")
