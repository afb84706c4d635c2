"""The commands: arguments in, exit code out. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ragspec.cli.ask import ask
from ragspec.cli.benchmark import benchmark
from ragspec.cli.doctor import doctor
from ragspec.cli.evaluate import evaluate
from ragspec.cli.generate import generate
from ragspec.cli.index import index
from ragspec.cli.init import init
from ragspec.cli.inspect import inspect
from ragspec.cli.options import INTERRUPTED, Debug, set_debug
from ragspec.cli.plan import plan
from ragspec.cli.push import push
from ragspec.cli.report import report
from ragspec.cli.retrieve import retrieve
from ragspec.cli.run_batch import run_batch
from ragspec.cli.search import search
from ragspec.cli.train_draft import train_draft
from ragspec.cli.tune import tune
from ragspec.cli.verify import verify
from ragspec.errors import ConfigError, RagspecError, flat

SWITCH = " "  # what help shows as the type of a flag without a value, instead of <bool>


class Command(TyperCommand):
    """A command whose help shows no type for flags that take no value, and whose flags are given once or add up."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not ctx.resilient_parsing:  # not while a shell completes a command
            _refuse_repeats(self.make_parser(ctx).parse_args(args=list(args))[2])
        return super().parse_args(ctx, args)


def _refuse_repeats(given: list[Any]) -> None:
    """Raise ConfigError for a flag given twice that takes one value: all but the last would be ignored."""
    for each in given:
        if each.param_type_name == "argument" or each.multiple or each.is_flag or each.count:
            continue
        if (times := sum(other is each for other in given)) > 1:
            name = next(name for name in each.opts if name.startswith("--"))
            files = "; for several files, name a folder or a pattern ('data/*.jsonl')" if each.name == "input" else ""
            raise ConfigError(f"{name}: given {times} times, but takes one value; give it once{files}")


class Group(TyperGroup):
    """The same for `ragspec` itself."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))


def _without_types(parameters: list[Any]) -> list[Any]:
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = SWITCH
    return parameters


app = typer.Typer(
    cls=Group,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Answer batches of RAG questions with speculative decoding.",
)

for command in (
    ask,
    generate,
    plan,
    init,
    run_batch,
    index,
    search,
    retrieve,
    inspect,
    benchmark,
    report,
    verify,
    evaluate,
    push,
    tune,
    train_draft,
    doctor,
):
    app.command(cls=Command)(command)


@app.callback(invoke_without_command=True)
def root(
    debug: Debug = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Handle the options that come before a command."""
    set_debug(debug)
    if version:
        from ragspec import __version__

        typer.echo(f"ragspec {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; an error becomes one line and an exit code."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' bars, wherever they are; tqdm reads it as it is imported
    try:
        app(prog_name="ragspec", standalone_mode=True)
    except RagspecError as error:
        if os.environ.get("RAGSPEC_DEBUG"):
            raise
        _say(" ".join(str(error).splitlines()))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except OSError as error:
        if os.environ.get("RAGSPEC_DEBUG"):
            raise
        _say(f"{error.filename or 'input or output'}: {error.strerror or error}")
        sys.exit(2)
    except Exception as error:
        if os.environ.get("RAGSPEC_DEBUG"):
            raise
        _say(f"{type(error).__name__}: {flat(error)} (a bug? --debug shows where)")
        sys.exit(3)


def _say(message: str) -> None:
    from ragspec.cli.run_log import is_json, write_event
    from ragspec.cli.tables import stderr
    from ragspec.config.redaction import Redactor

    if is_json():
        write_event("error", "error", Redactor()(message))
    else:
        stderr().print(f"error: {Redactor()(message)}", markup=False)
