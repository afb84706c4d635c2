"""`ragspec benchmark` and `ragspec report`: how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragspec.cli.options import INTERRUPTED, Config, Debug, Input, Limit, Set, load, set_debug


def benchmark(
    config: Config,
    input: Input = None,
    method: Annotated[list[str] | None, typer.Option("--method", "-m", help="Method to time; repeatable.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option("--batch-size", min=1, help="Repeatable.")] = None,
    num_tokens: Annotated[list[int] | None, typer.Option("--num-tokens", min=1, help="Repeatable.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed passes over the input, per method.")] = 3,
    limit: Limit = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Results and answers.")] = Path(
        "out/benchmark"
    ),
    override: Set = None,
    runner: Annotated[list[str] | None, typer.Option("--runner", help="Runner to time; repeatable.")] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Another tool beside: hf, hf-lookup, vllm, vllm-ngram, vllm-suffix; repeatable."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the passes of an interrupted run.")] = False,
    sequential: Annotated[bool, typer.Option(help="One model in memory at a time: no interleaving.")] = False,
    debug: Debug = False,
) -> None:
    """Time several methods on the same input: one process each, passes in turn, medians, ratios, and a report."""
    from ragspec.benchmark.measure import run_benchmark
    from ragspec.benchmark.plan import make_plan
    from ragspec.benchmark.table import print_results
    from ragspec.report.page import write_report

    set_debug(debug)
    run_config, console = load(config, override, input)
    plan = make_plan(run_config, method or [], batch_size or [], num_tokens or [], runner or [], peer or [])
    try:
        results = run_benchmark(
            plan, output, repeat=repeat, limit=limit, sequential=sequential, console=console, resume=resume
        )
    except KeyboardInterrupt:
        console.print("interrupted: finished passes are kept; the same command with --resume goes on", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    print_results(console, results, output)
    console.print(f"report in {write_report(results, output)}", markup=False)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where a benchmark left its results.json.")],
    answers: Annotated[
        bool, typer.Option(help="Show answers token by token, with their questions and passages.")
    ] = True,
) -> None:
    """Draw the report of a finished benchmark again."""
    from ragspec.benchmark.results import read_results
    from ragspec.cli.console import stderr
    from ragspec.report.page import write_report

    stderr().print(f"report in {write_report(read_results(folder), folder, quote=answers)}", markup=False)
