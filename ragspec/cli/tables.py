"""The console that people read: stderr, so that stdout is free for records."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
)
from rich.table import Table
from rich.text import Text

from ragspec.run.result_writer import Report
from ragspec.stats import OTHERS, OutputTotals, RunSummary

if TYPE_CHECKING:
    from ragspec.config.run import RunConfig
    from ragspec.retrieval.build import BuildSummary
    from ragspec.retrieval.corpus import Skipped
    from ragspec.run.loading import Loading
    from ragspec.run.local import Pipeline
    from ragspec.run.plan import Line


PIPED_WIDTH = 120


def stderr() -> Console:
    """Return a console on stderr: a terminal gets lines broken at words; a file gets them whole, without colour."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    width = None if terminal else PIPED_WIDTH
    # without emoji: line 100 of a file is no :100:
    return Console(stderr=True, soft_wrap=not terminal, highlight=False, emoji=False, width=width)


# -- what a finished command says on stderr: its notes, and a table of what it did ------------------------------------


WORKERS_SHOWN = 8
WHOLE = 100  # numbers from here have no decimals
HOURS, MINUTE_S = "hours", 60  # how a plan's times are called, and from when they are minutes and seconds
PER = {"j_per_record": "an answer", "j_per_output_token": "a token"}


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Print the notes, a line each."""
    for note in notes:
        console.print(f"note: {note}", markup=False, style="yellow")


def print_summary(console: Console, summary: RunSummary, output: str) -> None:
    """Print the table of a finished run, and its notes."""
    print_notes(console, summary.notes)
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
    if summary.energy is not None and summary.records:
        rows.append(("energy", _energy(summary)))
    if reasons := failure_reasons(summary):
        rows.append(("failed", reasons))
    if summary.shaped:
        cut = f", {summary.truncated:,} cut off at max_new_tokens" if summary.truncated else ""
        rows.append(("structured", f"{summary.valid:,} of {summary.shaped:,} answers valid{cut}"))
    if summary.retrieval and summary.retrieval["queries"]:
        rows.append(("retrieval", _retrieval(summary.retrieval)))
    if summary.workers:
        rows.append(("workers", _workers(summary)))
    if summary.totals is not None and summary.totals.spent.runs > 1:
        rows.append(("all runs", _all_runs(summary.totals)))
    if summary.planned:
        rows.append(("plan", summary.planned))
    rows.append(("output", "stdout" if output == "-" else output))
    _print_rows(console, rows)


def print_build(console: Console, summary: BuildSummary, index: str) -> None:
    """Print what a build did."""
    print_notes(console, summary.notes)
    documents = f"{summary.added:,} added, {summary.changed:,} changed, {summary.unchanged:,} unchanged"
    documents += f", {summary.removed:,} removed, {summary.skipped:,} skipped"
    rows = [
        ("documents", documents),
        ("passages", f"{summary.chunks:,} in the index, {summary.chunks_written:,} written now"),
        ("time", f"{summary.seconds:.1f} s"),
        ("index", index),
    ]
    _print_rows(console, rows)


def _workers(summary: RunSummary) -> str:
    shares = ", ".join(f"{worker.records:,}" for worker in summary.workers[:WORKERS_SHOWN])
    more = ", ..." if len(summary.workers) > WORKERS_SHOWN else ""
    replaced = sum(worker.deaths for worker in summary.workers)
    return f"{len(summary.workers)} ({shares}{more} records)" + (f", replaced {replaced} times" if replaced else "")


def _records(summary: RunSummary) -> str:
    parts = [f"{summary.records:,} answered"]
    if summary.failed:
        parts.append(f"{summary.failed:,} failed (error lines)")
    if summary.skipped:
        parts.append(f"{summary.skipped:,} finished before")
    if summary.failed_before:
        parts.append(f"{summary.failed_before:,} of them error lines (--retry-failed tries them again)")
    return ", ".join(parts)


def failure_reasons(summary: RunSummary) -> str:
    """Return why records failed, a line per cause; of an earlier run's failures, where this one had none."""
    failures = summary.failures
    if not summary.failed and summary.failed_before and summary.totals is not None:
        failures = summary.totals.failures
    if not failures.records:
        return ""
    ranked = failures.ranked()
    if len(ranked) == 1 and not failures.others and failures.records > 1:
        every = (
            "every record" if not summary.records and failures is summary.failures else f"{failures.records:,} records"
        )
        return f"{every}: {ranked[0][0]}"
    lines = [f"{count:,} x {message}" for message, count in ranked]
    return "\n".join(lines + ([f"{failures.others:,} x {OTHERS}"] if failures.others else []))


def _all_runs(totals: OutputTotals) -> str:
    spent = totals.spent
    failed = f", {totals.failed:,} failed" if totals.failed else ""
    return (
        f"{spent.runs:,}: {totals.records:,} answered{failed}, {totals.prompt_tokens:,} prompt and "
        f"{totals.output_tokens:,} output tokens, {spent.load_s:.1f} s load, {spent.warmup_s:.1f} s warm-up, "
        f"{spent.generate_s:.1f} s answering"
    )


def _speed(summary: RunSummary) -> str:
    if summary.tokens_per_s is None:
        return "-"
    text = f"{summary.tokens_per_s:.1f} output tokens/s"
    if summary.decode_tokens_per_s is not None:
        text += f" ({summary.decode_tokens_per_s:.1f} in decoding alone)"
    return text


def _energy(summary: RunSummary) -> str:
    assert summary.energy is not None
    found = summary.energy.to_json(summary.records, summary.output_tokens)
    per = [f"{found[key]:,.2f} J {what}" for key, what in PER.items() if key in found]
    whole = f"{found['run_j']:,.0f} J ({', '.join(found['domains_j'])})"
    return f"{whole}; answering: {', '.join(per)}" if per else whole


def _retrieval(found: dict[str, Any]) -> str:
    return (
        f"{found['queries']:,} searches ({found['mode']}), {found['ms_per_query']:.1f} ms each; "
        f"answering waited {found['waited_s']:.1f} s for them"
    )


def _print_rows(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print names and what there is to say about them: in columns on a terminal, on whole lines in a file."""
    if not console.soft_wrap:
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, Text(value))
        console.print(table)
        return
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        first, *others = value.split("\n")
        console.print(f"{name:{width}}  {first}", markup=False)
        for line in others:
            console.print(f"{'':{width}}  {line}", markup=False)


def print_hanging(console: Console, head: str, text: str, style: str) -> None:
    """Print a text after its head; on a terminal, its further lines are indented as the first."""
    if not console.is_terminal:
        console.print(f"{head} {text}", markup=False, style=style)
        return
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text(head), Text(text))
    console.print(table, style=style)


def print_plan(console: Console, lines: Iterable[Line]) -> None:
    """Print a plan as people read it: `--format` is for programs."""
    table = Table(box=None, pad_edge=False)
    table.add_column("what", no_wrap=True, style="bold")
    table.add_column("expected", justify="right", no_wrap=True)
    table.add_column("95% interval", no_wrap=True)
    table.add_column("basis", overflow="fold")
    for line in lines:
        is_time = line.what.startswith(HOURS)
        name, figure = _time_name(line.what), _duration if is_time else _figure
        low, high = (None if each is None else figure(each) for each in (line.low, line.high))
        between = "" if low is None or high is None or low == high else f"{low} to {high}"
        value = line.value if isinstance(line.value, str) else figure(line.value)
        table.add_row(*(Text(cell) for cell in (name, value, between, line.basis)))
    console.print(table)


def with_durations(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a plan's rows with hours as people read them, for tables that people read."""
    return [
        {
            name: _duration(value) if isinstance(value, float | int) else value
            for name, value in {**row, "what": _time_name(row["what"])}.items()
        }
        if row["what"].startswith(HOURS)
        else dict(row)
        for row in rows
    ]


def _time_name(what: str) -> str:
    return f"time{what.removeprefix(HOURS)}" if what.startswith(HOURS) else what


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= WHOLE or value == round(value) else f"{value:.2g}"


def _duration(hours: float) -> str:
    from ragspec.run.pace import clock

    return clock(hours * 3600) if hours * 3600 >= MINUTE_S else f"{hours * 3600:.0f} s"


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Show on a terminal what takes time, while it does."""
    with console.status(what) if console.is_terminal else nullcontext():
        yield


@dataclass(frozen=True, slots=True)
class _Shown:
    """What is loading, as it is whenever the terminal asks."""

    loading: Loading

    def __rich__(self) -> Text:
        return Text(self.loading.text(), overflow="ellipsis", no_wrap=True)


@contextmanager
def loaded(console: Console, config: RunConfig) -> Iterator[Pipeline]:
    """Yield a config's pipeline with its model loaded, saying on a terminal how far that is."""
    from ragspec.run.loading import Loading
    from ragspec.run.local import Pipeline

    loading = Loading(config)
    with ExitStack() as stack:
        with console.status(_Shown(loading)) if console.is_terminal else nullcontext():
            pipeline = Pipeline(config)
            stack.callback(pipeline.close)
            pipeline.load(loading.warming_up)
        yield pipeline


# -- progress bars, shown only if stderr is a terminal ----------------------------------------------------------------


REFRESH_S = 0.1


class _LeftColumn(ProgressColumn):
    """The time left, in words that tell it from the time spent."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        from ragspec.run.pace import clock

        return Text("" if task.time_remaining is None else f"{clock(task.time_remaining)} left")


def _columns() -> tuple[ProgressColumn, ...]:
    """Return what a bar of something that is counted shows."""
    return SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _LeftColumn()


@contextmanager
def progress(console: Console, loading: Loading) -> Iterator[Report]:
    """Yield what moves a terminal's bar, which appears with the first answer; until then it says what is loading."""
    columns = [*_columns(), TextColumn("{task.fields[detail]}")]
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("answering", total=None, detail="")
    shown_at = 0.0
    with ExitStack() as stack:
        until_then = stack.enter_context(console.status(_Shown(loading)))

        def report(summary: RunSummary, total: int | None) -> None:
            nonlocal shown_at
            if (now := time.monotonic()) - shown_at < REFRESH_S:
                return
            if not summary.records + summary.failed:
                if summary.load_s:
                    loading.warming_up()
                return
            if not bar.live.is_started:
                until_then.stop()
                stack.enter_context(bar)
            shown_at = now
            done = summary.records + summary.failed + summary.skipped
            bar.update(task, completed=done, total=total, detail=_detail(summary))

        yield report


def complain_of(console: Console, skipped: Skipped) -> None:
    """Name a document that is left out, and say why."""
    console.print(f"skipped: {skipped.where}: {skipped.why}", markup=False, style="yellow")


@contextmanager
def build_progress(console: Console) -> Iterator[tuple[Callable[[BuildSummary], None], Callable[[Skipped], None]]]:
    """Yield what shows a build's progress, and what names a document that was left out, and why."""
    complain = partial(complain_of, console)
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
