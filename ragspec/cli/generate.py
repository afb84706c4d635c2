"""`ragspec generate`: the main job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragspec.cli.flags import with_settings
from ragspec.cli.options import (
    CONTINUING,
    INTERRUPTED,
    LIMITS,
    TERMINATED,
    ConfigIfAny,
    Debug,
    InputOrStdin,
    Limit,
    LogEvery,
    LogFormat,
    MaxFailures,
    MaxNewTokens,
    Metrics,
    Plugin,
    Prices,
    Quiet,
    RayAddress,
    Resume,
    RetryFailed,
    Set,
    Stats,
    Tracing,
    Verbose,
    Workers,
    failures_allowed,
    overrides,
    quiet_pipe,
    scaled,
    set_debug,
    settings_of,
    unused_plugins,
    with_config,
)
from ragspec.cli.run_log import RunLog, Terminated, terminable

if TYPE_CHECKING:
    from rich.console import Console

    from ragspec.config.run import RunConfig
    from ragspec.run.price import Budget


Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH|-",
        help="Where answers go: .jsonl, .csv, .parquet, .lance, a folder of parts, a URL, or - for stdout.",
    ),
]
SETTINGS = (
    *("model", "runner", "dtype", "device", "revision", "trust_remote_code"),
    *("index", "top_k", "columns"),
    *("system", "template", "schema", "temperature", "top_p", "seed", "stop", "include"),
    *("method", "draft_model", "draft_tokens", "isolate", "batch_size"),
)


@with_settings(*SETTINGS)
def generate(
    settings: list[str],
    config: ConfigIfAny = None,
    input: InputOrStdin = None,
    output: Output = None,
    max_new_tokens: MaxNewTokens = None,
    limit: Limit = None,
    order: Annotated[
        str | None, typer.Option(metavar="ORDER", help="Order of the output lines: input or finish.")
    ] = None,
    resume: Resume = True,
    retry_failed: RetryFailed = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="Re-answer only the records whose prompt, sampling or model changed.",
            rich_help_panel=CONTINUING,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="With --update: only print which records to answer, and why.", rich_help_panel=CONTINUING
        ),
    ] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="With --update: remove answers whose records are no longer in the input.",
            rich_help_panel=CONTINUING,
        ),
    ] = False,
    keep_old: Annotated[
        bool,
        typer.Option("--keep-old", help="With --update: keep the old output as NAME.1.", rich_help_panel=CONTINUING),
    ] = False,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget",
            metavar="2h|$5|1Mtok",
            help="Stop at this budget; run again to continue. Repeatable: the first that is spent counts.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    price: Prices = None,
    max_failures: MaxFailures = None,
    stats: Stats = None,
    workers: Workers = None,
    ray_address: RayAddress = None,
    save_config: Annotated[
        str | None,
        typer.Option("--save-config", metavar="FILE|-", help="Also save these settings as a commented config."),
    ] = None,
    show: Annotated[
        int,
        typer.Option("--show", min=0, metavar="N", help="Print the first N answers at the end, with their passages."),
    ] = 0,
    plugin: Plugin = None,
    metrics: Metrics = None,
    tracing: Tracing = False,
    log_format: LogFormat = None,
    log_every: LogEvery = 30,
    quiet: Quiet = False,
    verbose: Verbose = False,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Answer all records of the input; run again to continue after an interruption."""
    from ragspec.cli.tables import stderr
    from ragspec.errors import ConfigError

    set_debug(debug)
    settings = [*overrides(None, max_new_tokens), *settings, *scaled(workers, ray_address)]
    for name, is_set in {"--dry-run": dry_run, "--prune": prune, "--keep-old": keep_old}.items():
        if is_set and not update:
            raise ConfigError(f"{name} only works with --update")
    if show:
        settings.append("output.include=[query, contexts]")
    run_config, notes, values = settings_of(config, settings, override, input=input, output=output, order=order)
    notes += unused_plugins(run_config, plugin)
    allowed = failures_allowed(max_failures)
    limits = budgets_of(budget, price)
    log = RunLog(stderr(), quiet=quiet, verbose=verbose, every_s=log_every)
    if save_config is not None:
        save(run_config, values, save_config, plugin)
        if save_config != "-":
            log.say(f"config in {save_config}")
    if dry_run:
        show_update(run_config, notes, limit=limit, retry_failed=retry_failed, prune=prune)
        return
    given: dict[str, Any] = {"limit": limit, "resume": resume, "retry_failed": retry_failed, "stats_path": stats}
    given |= {"update": update, "prune": prune, "keep_old": keep_old, "budget": limits}
    run(run_config, notes, allowed, log, show=show, metrics=metrics, tracing=tracing, **given)


def budgets_of(budget: list[str] | None, price: list[str] | None) -> list[Budget]:
    """Return what `--budget` and `--price` mean. Raises ConfigError."""
    from ragspec.run.price import Budget, Price

    prices = [Price.of(each) for each in price or ()]
    return [Budget.of(each, prices) for each in budget or ()]


def show_answers(console: Console, output: str, count: int) -> None:
    """Show the first answers of an output with their passages, as `ragspec ask` does. Nothing for stdout."""
    from itertools import islice

    from ragspec.cli.answer_view import AnswerView
    from ragspec.outputs.reader import answer_lines

    if output == "-":
        return
    view = AnswerView(console, console)
    for line in islice((line for line in answer_lines(output) if "output" in line), count):
        view.show(line)
        console.print()


def show_update(config: RunConfig, notes: list[str], *, limit: int | None, retry_failed: bool, prune: bool) -> None:
    """Print which records an update would answer and why, a JSON line each, and on stderr how many."""
    import sys

    from ragspec.cli.tables import print_notes, stderr
    from ragspec.json_text import dumps
    from ragspec.outputs.update import REASONS
    from ragspec.run.generate import dry_update

    plan = dry_update(config, limit=limit, retry_failed=retry_failed, prune=prune)
    with quiet_pipe():
        for record_id, why in plan.again:
            sys.stdout.write(dumps({"id": record_id, "why": REASONS[why]}).decode() + "\n")
        for record_id in plan.left:
            sys.stdout.write(dumps({"id": record_id, "why": "left the input"}).decode() + "\n")
    console = stderr()
    print_notes(console, notes)
    console.print(str(plan), markup=False)


def save(config: RunConfig, values: dict[str, Any], path: str, plugin: list[str] | None) -> None:
    """Write the config of a command line; to stdout for -. Raises ConfigError."""
    from pathlib import Path

    from ragspec.config.written import save_config
    from ragspec.errors import ConfigError

    printed = path == "-"
    if printed and str(config.output) == "-":
        raise ConfigError("--save-config -: answers also go to stdout; use --output FILE")
    why = [f"Written by ragspec generate --save-config. Run it: ragspec generate {with_config(path, plugin)}"]
    save_config(config, values, Path(path), why, force=False)


def run(
    config: RunConfig, notes: list[str], allowed: Callable[[int], float], log: RunLog, *, show: int = 0, **given: Any
) -> None:
    """Answer a config's input, saying how it goes and the totals on stderr.

    allowed: returns how many of so many records may fail; exits with 1 if more did. show: so many answers, before the
    totals. given: as for ragspec.run.generate.
    """
    from ragspec.outputs.journal import whereabouts
    from ragspec.outputs.target import target_of
    from ragspec.run.generate import generate as answer

    try:
        with quiet_pipe(), terminable(), log.watching(config) as report:
            summary = answer(config, notes=notes, report=report, observers=log.observers, say=log.say, **given)
    except KeyboardInterrupt as stop:
        log.stopped(stop, whereabouts(target_of(config.output)))
        raise typer.Exit(TERMINATED if isinstance(stop, Terminated) else INTERRUPTED) from None
    if show:
        show_answers(log.console, str(config.output), show)
    log.finished(summary, str(config.output))
    if summary.stopped:
        said = whereabouts(target_of(config.output))
        log.say(f"stopped: {summary.stopped}; {said}, with a larger budget", "stopped", "warning")
        raise typer.Exit(INTERRUPTED)
    if summary.failed + summary.failed_before > allowed(summary.records + summary.failed + summary.skipped):
        raise typer.Exit(1)
