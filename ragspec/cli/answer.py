"""`ragspec generate`: the main job."""

from __future__ import annotations

from typing import Annotated

import typer

from ragspec.cli.options import (
    INTERRUPTED,
    Config,
    Debug,
    InputOrStdin,
    Limit,
    MaxNewTokens,
    Set,
    overrides,
    quiet_pipe,
    set_debug,
)


def generate(
    config: Config,
    input: InputOrStdin = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE|-", help="Where answers go: JSONL, or - for stdout.")
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    limit: Limit = None,
    order: Annotated[
        str | None, typer.Option(metavar="ORDER", help="Order of the output lines: input or finish.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Continue an output begun before, or start over and keep it as a copy.")
    ] = True,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retry the records that failed in an earlier run.")
    ] = False,
    stats: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where statistics go. By default beside the output.")
    ] = None,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Draft from a record's own text only, not from other records'.")
    ] = False,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Answer every record of the input; rerun to continue after an interruption."""
    from ragspec.cli.console import stderr
    from ragspec.cli.progress import progress
    from ragspec.cli.tables import print_summary
    from ragspec.config.load import load_config
    from ragspec.outputs.journal import whereabouts
    from ragspec.run.generate import generate as answer

    set_debug(debug)
    console = stderr()
    settings = [*overrides(override, max_new_tokens), *(["speculation.isolate=true"] if isolate else [])]
    run_config, notes = load_config(config, settings, input=input, output=output, order=order)
    try:
        with quiet_pipe(), progress(console) as report:
            summary = answer(
                run_config,
                limit=limit,
                resume=resume,
                retry_failed=retry_failed,
                stats_path=stats,
                notes=notes,
                report=report,
            )
    except KeyboardInterrupt:
        console.print(f"interrupted: {whereabouts(run_config.output)}", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    print_summary(console, summary, run_config.output)
    if summary.failed or summary.failed_before:
        raise typer.Exit(1)
