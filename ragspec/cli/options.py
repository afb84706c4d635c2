"""The options that commands share, and what they do alike. Nothing heavy is imported."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ragspec.config.run import RunConfig

INTERRUPTED = 130

Config = Annotated[str, typer.Option("--config", "-c", help="YAML config: ragspec's own or AutoGluon-RAG's.")]
Input = Annotated[str | None, typer.Option("--input", "-i", metavar="FILE", help="JSONL to answer.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a key; repeatable.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Read so many lines only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def set_debug(debug: bool) -> None:
    """Show tracebacks from now on, if `debug`: of what ends the run, and of what costs a record only."""
    if debug:
        os.environ["RAGSPEC_DEBUG"] = "1"
    if os.environ.get("RAGSPEC_DEBUG"):
        logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s")
        logging.getLogger("ragspec").setLevel(logging.DEBUG)


def load(config: str, override: list[str] | None, input: str | None) -> tuple[RunConfig, Console]:
    """Return the config, its notes said, and the console on stderr."""
    from ragspec.cli.console import print_notes, stderr
    from ragspec.config.load import load_config

    console = stderr()
    run_config, notes = load_config(config, override or (), input=input)
    print_notes(console, notes)
    return run_config, console


@contextmanager
def quiet_pipe() -> Iterator[None]:
    """End the command without a word where the reader of its stdout has gone (`| head`)."""
    try:
        yield
    except BrokenPipeError:
        # silence the interpreter's own flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None
