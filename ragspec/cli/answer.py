"""`ragspec generate`: the main job."""

from __future__ import annotations

from typing import Annotated

import typer

from ragspec.cli.options import INTERRUPTED, Config, Debug, Limit, Set, quiet_pipe, set_debug


def generate(
    config: Config,
    input: Annotated[
        str | None, typer.Option("--input", "-i", metavar="FILE|-", help="JSONL, .gz and .zst too.")
    ] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE|-", help="JSONL of answers.")] = None,
    override: Set = None,
    limit: Limit = None,
    resume: Annotated[bool, typer.Option(help="Go on with an output begun before; else keep it as a copy.")] = True,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try the error lines of that output again.")
    ] = False,
    order: Annotated[str | None, typer.Option(help="Order of the output lines: input or finish.")] = None,
    stats: Annotated[str | None, typer.Option(metavar="FILE", help="Where the statistics go.")] = None,
    isolate: Annotated[bool, typer.Option("--isolate", help="No drafts from other records' texts.")] = False,
    debug: Debug = False,
) -> None:
    """Answer every record of the input. Run the same command again to go on after an interruption."""
    from ragspec.cli.console import print_summary, progress, stderr
    from ragspec.config.load import load_config
    from ragspec.outputs.journal import whereabouts
    from ragspec.run.generate import generate as answer

    set_debug(debug)
    console = stderr()
    overrides = [*(override or ()), *(["speculation.isolate=true"] if isolate else [])]
    run_config, notes = load_config(config, overrides, input=input, output=output, order=order)
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
