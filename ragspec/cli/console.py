"""What a person sees, on stderr: a progress bar where there is a terminal, and the table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ragspec.run.local import Report
from ragspec.stats import RunSummary

if TYPE_CHECKING:
    from ragspec.retrieval.build import BuildSummary
    from ragspec.retrieval.corpus import Skipped

REFRESH_S = 0.1
PIPED_WIDTH = 120


def stderr() -> Console:
    """Return a console on stderr, without colour where that is no terminal."""
    return Console(stderr=True, soft_wrap=True, highlight=False, width=None if sys.stderr.isatty() else PIPED_WIDTH)


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Print what a person should know, a line each."""
    for note in notes:
        console.print(f"note: {note}", markup=False, style="yellow")


@contextmanager
def progress(console: Console) -> Iterator[Report | None]:
    """Yield what moves the bar, or None where there is no terminal to show one."""
    if not console.is_terminal:
        yield None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading the model", total=None, detail="")
        shown_at = 0.0

        def report(summary: RunSummary, total: int | None) -> None:
            nonlocal shown_at
            if (now := time.monotonic()) - shown_at < REFRESH_S:
                return
            shown_at = now
            done = summary.records + summary.failed + summary.skipped
            bar.update(task, description="answering", completed=done, total=total, detail=_detail(summary))

        yield report


def _detail(summary: RunSummary) -> str:
    parts = []
    if summary.tokens_per_s:
        parts.append(f"{summary.tokens_per_s:.1f} tokens/s")
    if summary.spec.acceptance_rate is not None:
        parts.append(f"{summary.spec.acceptance_rate:.0%} of drafts accepted")
    if summary.failed:
        parts.append(f"{summary.failed} failed")
    return ", ".join(parts)


def print_summary(console: Console, summary: RunSummary, output: str) -> None:
    """Print the table of a finished run, and its notes."""
    print_notes(console, summary.notes)
    table = _table()
    spec = summary.spec
    rows = [
        ("records", _records(summary)),
        ("tokens", f"{summary.prompt_tokens:,} prompt, {summary.output_tokens:,} output"),
        ("speed", _speed(summary)),
        (
            "time",
            f"{summary.load_s:.1f} s load, {summary.warmup_s:.1f} s warm-up, {summary.generate_s:.1f} s answering",
        ),
        ("speculation", summary.method),
    ]
    if spec.drafted:
        rows += [
            ("acceptance", f"{spec.acceptance_rate:.1%} ({spec.accepted:,} of {spec.drafted:,} drafted tokens)"),
            ("tokens per step", f"{summary.tokens_per_step:.2f} ({spec.mean_acceptance_length:.2f} where it drafted)"),
        ]
    if summary.retrieval and summary.retrieval["queries"]:
        rows.append(("retrieval", _retrieval(summary.retrieval)))
    rows.append(("output", "stdout" if output == "-" else output))
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(table)


def _records(summary: RunSummary) -> str:
    parts = [f"{summary.records:,} answered"]
    if summary.failed:
        parts.append(f"{summary.failed:,} failed (error lines)")
    if summary.skipped:
        parts.append(f"{summary.skipped:,} finished before")
    if summary.failed_before:
        parts.append(f"{summary.failed_before:,} of them error lines (--retry-failed tries them again)")
    return ", ".join(parts)


def _retrieval(found: dict[str, Any]) -> str:
    return (
        f"{found['queries']:,} searches ({found['mode']}), {found['ms_per_query']:.1f} ms each; "
        f"answering waited {found['waited_s']:.1f} s for them"
    )


def _speed(summary: RunSummary) -> str:
    if summary.tokens_per_s is None:
        return "-"
    text = f"{summary.tokens_per_s:.1f} output tokens/s"
    if summary.decode_tokens_per_s is not None:
        text += f" ({summary.decode_tokens_per_s:.1f} in decoding alone)"
    return text


@contextmanager
def build_progress(console: Console) -> Iterator[tuple[Callable[[BuildSummary], None], Callable[[Skipped], None]]]:
    """Yield what shows a build's progress, and what says which document was left out and why."""

    def complain(skipped: Skipped) -> None:
        console.print(f"skipped: {skipped.where}: {skipped.why}", markup=False, style="yellow")

    if not console.is_terminal:
        yield lambda _: None, complain
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task("indexing", total=None)

        def report(summary: BuildSummary) -> None:
            done = f"{summary.seen:,} documents read, {summary.unchanged:,} of them unchanged"
            bar.update(task, description=f"{done}; {summary.chunks_written:,} passages written")

        yield report, complain


def print_build(console: Console, summary: BuildSummary, index: str) -> None:
    """Print what a build did."""
    print_notes(console, summary.notes)
    documents = f"{summary.added:,} added, {summary.changed:,} changed, {summary.unchanged:,} unchanged"
    documents += f", {summary.removed:,} removed, {summary.skipped:,} skipped"
    table = _table()
    table.add_row("documents", documents)
    table.add_row("passages", f"{summary.chunks:,} in the index, {summary.chunks_written:,} written now")
    table.add_row("time", f"{summary.seconds:.1f} s")
    table.add_row("index", Text(index))
    console.print(table)


def _table() -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    return table
