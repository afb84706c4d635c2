"""run(config) -> RunSummary: lines in, records, prompts, requests, generations, lines out.

Everything is a generator pulled by the runner, so memory does not grow with the input.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ragspec import runners
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.inputs.jsonl import Lines
from ragspec.outputs.journal import Journal
from ragspec.outputs.runstate import PENDING, STATE, STATISTICS, check_writable, sibling, write_json
from ragspec.prompts.builder import PromptBuilder
from ragspec.retrieval.search import Retriever
from ragspec.run.local import Batch, Report
from ragspec.run.provenance import about
from ragspec.runners.base import Runner
from ragspec.stats import RunSummary


def run(
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

    limit: read so many lines only. report: called as records finish. Raises ConfigError and ModelError.
    """
    if config.input is None:
        raise ConfigError("input: missing; set it in the config, or give --input FILE (- for stdin)")
    if retry_failed and limit is not None:
        raise ConfigError("--retry-failed drops all error lines: it does not combine with --limit")
    _check_paths(config, stats_path)
    veil = config.veil()
    with veil.over_errors(), ExitStack() as stack:
        lines = stack.enter_context(Lines(config.input))
        runner: Runner = runners.module(config.runner).Runner(config)
        runner.check()
        prompts = make_prompts(config, runner)
        retriever = open_retriever(config)
        identity = config.identity() | ({"index": retriever.index.identity} if retriever else {})
        if stats_path:
            check_writable(Path(stats_path), "--stats")
        journal = stack.enter_context(
            Journal(
                config.output,
                identity,
                order=config.order,
                resume=resume,
                retry_failed=retry_failed,
                partial=limit is not None,
            )
        )
        batch = Batch(config, lines, runner, prompts, journal, limit, report, retriever=retriever)
        summary = batch.summary
        summary.notes += notes or []
        try:
            batch.answer()
        finally:
            summary.notes += [note for note in map(veil, runner.notes) if note not in summary.notes]
            summary.notes += prompts.notes
            summary.about = about(config, runner)
            _write_stats(summary, Path(stats_path) if stats_path else None, journal)
    return summary


def _check_paths(config: RunConfig, stats_path: str | None) -> None:
    """Raise ConfigError where one file would have two uses. The files beside the output count too."""
    uses = {"the input": config.input, "output": config.output, "--stats": stats_path}
    if config.output != "-":
        uses["the run's state"] = str(sibling(config.output, STATE))
        uses["the answers ahead of their turn"] = str(sibling(config.output, PENDING))
        if stats_path is None:
            uses["the statistics"] = str(sibling(config.output, STATISTICS))
    taken: dict[Path, str] = {}
    for use, name in uses.items():
        if name in (None, "-") or name.startswith("/dev/"):
            continue
        other = taken.setdefault(Path(name).resolve(), use)
        if other != use:
            raise ConfigError(f"{name} would be {other} and {use}; choose another --output")


def _write_stats(summary: RunSummary, path: Path | None, journal: Journal) -> None:
    """Write the stats file. A run that found all finished leaves the one of the run that did the work."""
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


def open_retriever(config: RunConfig) -> Retriever | None:
    """Return the search in the config's index, its models loaded; None where it has none. Raises ConfigError."""
    return Retriever(config.retrieval) if config.retrieval else None


def make_prompts(config: RunConfig, runner: Runner) -> PromptBuilder:
    """Return the run's prompt builder. Raises ConfigError where no prompt could ever be built."""
    new, length = config.sampling.max_new_tokens, runner.context_length
    if length is not None and new >= length:
        raise ConfigError(
            f"sampling.max_new_tokens: {new} leaves no room for a prompt; the model takes {length} tokens in all"
        )
    return PromptBuilder(config.prompt, runner.tokenizer, length)
