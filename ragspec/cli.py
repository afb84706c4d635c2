"""The commands: arguments in, exit code out. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ragspec.errors import RagspecError

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Batch RAG generation with speculative decoding: a JSONL of questions in, answers and their speed out.",
)

Config = Annotated[str, typer.Option("--config", "-c", help="YAML config: ragspec's own or AutoGluon-RAG's.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a key; repeatable.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Read so many lines only.")]
INTERRUPTED = 130


@app.callback(invoke_without_command=True)
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Take the options that stand before a command."""
    if debug:
        os.environ["RAGSPEC_DEBUG"] = "1"
    if version:
        from ragspec import __version__

        typer.echo(f"ragspec {__version__}")
        raise typer.Exit


@app.command()
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
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Answer every record of the input. Run the same command again to go on after an interruption."""
    from ragspec.config import load_config
    from ragspec.console import print_summary, progress, stderr
    from ragspec.pipeline import run

    _debug(debug)
    console = stderr()
    overrides = [*(override or ()), *(["speculation.isolate=true"] if isolate else [])]
    run_config, notes = load_config(config, overrides, input=input, output=output, order=order)
    try:
        with progress(console) as report:
            summary = run(
                run_config,
                limit=limit,
                resume=resume,
                retry_failed=retry_failed,
                stats_path=stats,
                notes=notes,
                report=report,
            )
    except KeyboardInterrupt:
        where = "" if run_config.output == "-" else "; run the same command again to go on"
        console.print(f"interrupted: finished answers are kept{where}", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # the reader has gone (`| head`): silence the interpreter's own flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None
    print_summary(console, summary, run_config.output)
    if summary.failed or summary.failed_before:
        raise typer.Exit(1)


@app.command()
def benchmark(
    config: Config,
    input: Annotated[str | None, typer.Option("--input", "-i", metavar="FILE", help="JSONL to answer.")] = None,
    method: Annotated[list[str] | None, typer.Option("--method", "-m", help="Method to time; repeatable.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option("--batch-size", min=1, help="Repeatable.")] = None,
    num_tokens: Annotated[list[int] | None, typer.Option("--num-tokens", min=1, help="Repeatable.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed passes over the input, per method.")] = 3,
    limit: Limit = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Results and answers.")] = Path(
        "out/benchmark"
    ),
    override: Set = None,
    sequential: Annotated[bool, typer.Option(help="One model in memory at a time: no interleaving.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Time several methods on the same input: one process each, passes in turn, medians and ratios."""
    from ragspec.benchmark.measure import run_benchmark
    from ragspec.benchmark.plan import make_plan
    from ragspec.benchmark.table import print_results
    from ragspec.config import load_config
    from ragspec.console import stderr

    _debug(debug)
    console = stderr()
    run_config, notes = load_config(config, override or (), input=input)
    for note in notes:
        console.print(f"note: {note}", markup=False, style="yellow")
    plan = make_plan(run_config, method or [], batch_size or [], num_tokens or [])
    try:
        results = run_benchmark(plan, output, repeat=repeat, limit=limit, sequential=sequential, console=console)
    except KeyboardInterrupt:
        console.print("interrupted: no results were written", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    print_results(console, results, output)


def _debug(debug: bool) -> None:
    if debug:
        os.environ["RAGSPEC_DEBUG"] = "1"


def main() -> None:
    """Run the command line; errors become one line and an exit code."""
    try:
        app(prog_name="ragspec", standalone_mode=True)
    except RagspecError as error:
        if os.environ.get("RAGSPEC_DEBUG"):
            raise
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except OSError as error:
        if os.environ.get("RAGSPEC_DEBUG"):
            raise
        print(f"error: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if os.environ.get("RAGSPEC_DEBUG"):
            raise
        text = " ".join(str(error).split())
        print(f"error: {type(error).__name__}: {text} (a bug? --debug shows where)", file=sys.stderr)
        sys.exit(3)
