"""`ragspec benchmark`: how fast methods are on an input."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragspec.cli.completion import complete_methods, complete_runners
from ragspec.cli.flags import WHAT, with_settings
from ragspec.cli.options import (
    INTERRUPTED,
    ConfigIfAny,
    Debug,
    Format,
    Input,
    Limit,
    MaxNewTokens,
    Plugin,
    RayAddress,
    Set,
    load,
    print_table,
    scaled,
    set_debug,
)
from ragspec.speculation.methods import METHODS


@with_settings(*WHAT)
def benchmark(
    settings: list[str],
    config: ConfigIfAny = None,
    input: Input = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for results, report and answers.")
    ] = Path("out/benchmark"),
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            metavar="METHOD",
            autocompletion=complete_methods,
            help=f"Method to time ({', '.join(METHODS)}); repeatable. By default, none and the config's.",
        ),
    ] = None,
    runner: Annotated[
        list[str] | None,
        typer.Option(
            "--runner",
            metavar="RUNNER",
            autocompletion=complete_runners,
            help="Runner to time (huggingface, vllm); repeatable.",
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option("--batch-size", min=1, metavar="N", help="Batch size; repeatable.")
    ] = None,
    draft_tokens: Annotated[
        list[int] | None, typer.Option("--draft-tokens", min=1, metavar="N", help="Draft length; repeatable.")
    ] = None,
    num_tokens: Annotated[list[int] | None, typer.Option("--num-tokens", min=1, hidden=True)] = None,
    max_new_tokens: MaxNewTokens = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER",
            help="Another tool to time (hf, hf-lookup, hf-structured, vllm, vllm-ngram, vllm-suffix); repeatable.",
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Timed passes over the input per candidate.")] = 3,
    limit: Limit = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the passes of an interrupted run.")] = False,
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential/--no-sequential", help="Keep one model in memory at a time, without alternating passes."
        ),
    ] = False,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Start a new process for each pass, as processes can differ in speed."),
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also show where time is spent, and this machine's limits.")
    ] = False,
    workers: Annotated[
        list[int] | None,
        typer.Option(
            "--workers",
            min=0,
            metavar="N",
            help="Answer on N workers (docs/guide/scale.md); 0 for one process; repeatable.",
        ),
    ] = None,
    ray_address: RayAddress = None,
    prompt_order: Annotated[
        list[str] | None,
        typer.Option("--prompt-order", metavar="ORDER", help="Passage order (rank, canonical, shared); repeatable."),
    ] = None,
    format: Format = None,
    plugin: Plugin = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Compare the speed of methods on your input."""
    from ragspec.benchmark.details import print_results, table_of
    from ragspec.benchmark.measure import run_benchmark
    from ragspec.benchmark.plan import make_plan
    from ragspec.errors import ConfigError
    from ragspec.report.page import verdict, write_report
    from ragspec.report.table import check_format

    set_debug(debug)
    check_format(format)
    run_config, console = load(config, [*settings, *scaled(None, ray_address)], override, input, max_new_tokens)
    draft_lengths = [*(draft_tokens or ()), *(num_tokens or ())]
    plan = make_plan(
        run_config,
        method or [],
        batch_size or [],
        draft_lengths,
        runner or [],
        peer or [],
        workers or [],
        prompt_order or [],
    )
    try:
        results = run_benchmark(
            plan,
            output,
            repeat=repeat,
            limit=limit,
            sequential=sequential,
            console=console,
            resume=resume,
            profile=profile,
            restart=restart,
        )
    except KeyboardInterrupt:
        console.print("interrupted: finished passes are kept; run again with --resume to continue", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    print_results(console, results, output)
    for sentence in verdict(results):
        console.print(sentence, markup=False)
    if format is not None:
        print_table(table_of(results), format)
    try:
        console.print(f"report in {write_report(results, output)}", markup=False)
    except ConfigError as error:  # the figures are there; what draws them is an extra
        console.print(f"no report: {error}; then: ragspec report {output}", markup=False)
