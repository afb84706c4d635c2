"""`ragspec generate`: the main job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from ragspec.cli.options import (
    INTERRUPTED,
    Config,
    Debug,
    InputOrStdin,
    Limit,
    MaxFailures,
    MaxNewTokens,
    RayAddress,
    Resume,
    RetryFailed,
    Set,
    Stats,
    Workers,
    failures_allowed,
    overrides,
    quiet_pipe,
    scaled,
    set_debug,
)

if TYPE_CHECKING:
    from ragspec.config.run import RunConfig


def generate(
    config: Config,
    input: InputOrStdin = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH|-",
            help="Where answers go: a JSONL file, a folder of parts, a URL, or - for stdout.",
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    limit: Limit = None,
    order: Annotated[
        str | None, typer.Option(metavar="ORDER", help="Order of the output lines: input or finish.")
    ] = None,
    resume: Resume = True,
    retry_failed: RetryFailed = False,
    max_failures: MaxFailures = None,
    stats: Stats = None,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Draft from a record's own text only, not from other records.")
    ] = False,
    workers: Workers = None,
    ray_address: RayAddress = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Answer every record of the input; rerun to continue after an interruption."""
    from ragspec.config.load import load_config

    set_debug(debug)
    settings = [*overrides(override, max_new_tokens), *(["speculation.isolate=true"] if isolate else [])]
    settings += scaled(workers, ray_address)
    run_config, notes = load_config(config, settings, input=input, output=output, order=order)
    allowed = failures_allowed(max_failures)
    run(run_config, notes, allowed, limit=limit, resume=resume, retry_failed=retry_failed, stats_path=stats)


def run(
    config: RunConfig,
    notes: list[str],
    allowed: Callable[[int], float],
    *,
    limit: int | None,
    resume: bool,
    retry_failed: bool,
    stats_path: str | None,
) -> None:
    """Answer a config's input, with a progress bar and the totals on stderr.

    allowed: returns how many of so many records may fail; exits with 1 if more did.
    """
    from ragspec.cli.tables import print_summary, progress, stderr
    from ragspec.outputs.journal import whereabouts
    from ragspec.outputs.target import target_of
    from ragspec.run.generate import generate as answer

    console = stderr()
    try:
        with quiet_pipe(), progress(console) as report:
            summary = answer(
                config,
                limit=limit,
                resume=resume,
                retry_failed=retry_failed,
                stats_path=stats_path,
                notes=notes,
                report=report,
                say=lambda said: console.print(said, markup=False),
            )
    except KeyboardInterrupt:
        console.print(f"interrupted: {whereabouts(target_of(config.output))}", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    print_summary(console, summary, str(config.output))
    if summary.failed + summary.failed_before > allowed(summary.records + summary.failed + summary.skipped):
        raise typer.Exit(1)
