"""Progress bars, shown only if stderr is a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from ragspec.run.desk import Report
from ragspec.stats import RunSummary

if TYPE_CHECKING:
    from ragspec.retrieval.build import BuildSummary
    from ragspec.retrieval.corpus import Skipped

REFRESH_S = 0.1


def _columns() -> tuple[ProgressColumn, ...]:
    """Return what a bar of something that is counted shows."""
    return SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()


@contextmanager
def progress(console: Console) -> Iterator[Report | None]:
    """Yield what moves the bar, or None if there is no terminal to show one."""
    if not console.is_terminal:
        yield None
        return
    with Progress(*_columns(), TextColumn("{task.fields[detail]}"), console=console, transient=True) as bar:
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


@contextmanager
def build_progress(console: Console) -> Iterator[tuple[Callable[[BuildSummary], None], Callable[[Skipped], None]]]:
    """Yield what shows a build's progress, and what names a document that was left out, and why."""

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


def _detail(summary: RunSummary) -> str:
    parts = []
    if summary.tokens_per_s:
        parts.append(f"{summary.tokens_per_s:.1f} tokens/s")
    if summary.spec.acceptance_rate is not None:
        parts.append(f"{summary.spec.acceptance_rate:.0%} of drafts accepted")
    if summary.workers:
        parts.append(f"{sum(worker.alive for worker in summary.workers)} of {len(summary.workers)} workers")
    if summary.failed:
        parts.append(f"{summary.failed} failed")
    return ", ".join(parts)


@contextmanager
def learning_progress(console: Console) -> Iterator[Callable[[int, int, float], None]]:
    """Yield what shows how far a draft has learnt."""
    if not console.is_terminal:
        yield lambda done, steps, loss: None
        return
    with Progress(*_columns(), console=console, transient=True) as bar:
        task = bar.add_task("learning", total=None, visible=False)  # what comes before and after says so itself

        def report(done: int, steps: int, loss: float) -> None:
            bar.update(
                task, description=f"learning, loss {loss:.2f}", completed=done, total=steps, visible=done < steps
            )

        yield report
