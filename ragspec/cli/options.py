"""The options and steps that commands share. Nothing heavy is imported."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ragspec.config.io import InputConfig
    from ragspec.config.run import RunConfig
    from ragspec.config.sections import RetrievalConfig

INTERRUPTED, TERMINATED = 130, 143
CONTINUING, LIMITS, WATCHING = "Resuming", "Limits", "Monitoring"

RECORDS = (
    "Records to answer: JSONL, JSON, CSV, TSV, Parquet or Arrow, a folder of them, or .txt with a question per line"
)
CONFIG = typer.Option("--config", "-c", metavar="FILE", help="YAML config for ragspec or AutoGluon-RAG.")
Config = Annotated[str, CONFIG]
ConfigIfAny = Annotated[str | None, CONFIG]
Input = Annotated[str | None, typer.Option("--input", "-i", metavar="FILE", help=f"{RECORDS}.")]
InputOrStdin = Annotated[
    str | None, typer.Option("--input", "-i", metavar="FILE|-", help=f"{RECORDS}, or - for stdin.")
]


def _each_key_once(given: list[str] | None) -> list[str] | None:
    refuse_two_values("set", given or ())
    return given


Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", callback=_each_key_once, help="Override a config key; repeatable."),
]
Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help="Read only the first N records.")]
MaxNewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", min=1, metavar="N", help="Longest answer, in tokens.")
]
Resume = Annotated[
    bool,
    typer.Option(
        help="Continue an existing output, or start over and keep a copy of the old one.", rich_help_panel=CONTINUING
    ),
]
RetryFailed = Annotated[
    bool,
    typer.Option("--retry-failed", help="Retry the records that failed in an earlier run.", rich_help_panel=CONTINUING),
]
MaxFailures = Annotated[
    str | None,
    typer.Option(
        "--max-failures",
        metavar="N|P%",
        help="Exit with 0 if at most this many records, or this share, failed.",
        rich_help_panel=LIMITS,
    ),
]
Stats = Annotated[str | None, typer.Option(metavar="FILE", help="Statistics file; by default, next to the output.")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, metavar="N", help="Answer on N workers, on this machine or a Ray cluster."),
]
Prices = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        metavar="PRICE",
        help="2.5/h, 0.3/kWh@150W, or 0.6/Mtok (as for an API); repeatable.",
        rich_help_panel=LIMITS,
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", metavar="ADDRESS", help="Ray cluster: local, auto, HOST:PORT or ray://HOST:PORT."),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--columns", metavar="FIELD=NAME", help="The file's name for a field, for instance id=qid; repeatable."
    ),
]


def _with_plugins(paths: list[str] | None) -> list[str] | None:
    """Make the drafters in files known before anything looks up a method."""
    if paths:
        from ragspec.speculation.plugin_files import add_plugins

        add_plugins(paths)
    return paths


Plugin = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py",
        callback=_with_plugins,
        help="Load your own drafter; the file's name becomes its --method. Repeatable.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]
Format = Annotated[
    str | None, typer.Option("--format", metavar="FORMAT", help="Print the table to stdout as md, csv, latex or json.")
]
OptionalConfig = Annotated[
    str | None, typer.Option("--config", "-c", metavar="FILE", help="Config with a retrieval section.")
]


Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Serve Prometheus metrics here during the run.",
        rich_help_panel=WATCHING,
    ),
]
Tracing = Annotated[
    bool,
    typer.Option("--tracing", help="Send OpenTelemetry spans for the run and its records.", rich_help_panel=WATCHING),
]


def _with_log_format(given: str | None) -> str | None:
    from ragspec.cli.run_log import set_log_format

    set_log_format(given)
    return given


LogFormat = Annotated[
    str | None,
    typer.Option(
        "--log-format",
        metavar="FORMAT",
        callback=_with_log_format,
        is_eager=True,
        help="Format of stderr: text, or json (one object per line).",
        rich_help_panel=WATCHING,
    ),
]
LogEvery = Annotated[
    float,
    typer.Option(
        "--log-every",
        min=0,
        metavar="SECONDS",
        help="Seconds between progress lines; 0 for none.",
        rich_help_panel=WATCHING,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors and failures.", rich_help_panel=WATCHING)]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also print a line per record.", rich_help_panel=WATCHING)
]


def set_debug(debug: bool) -> None:
    """Show tracebacks from now on, if `debug`: of errors that end the run, and of those that cost only a record."""
    if debug:
        os.environ["RAGSPEC_DEBUG"] = "1"
    if os.environ.get("RAGSPEC_DEBUG"):
        from ragspec.cli.run_log import JsonHandler, is_json

        as_lines: dict[str, Any] = {"handlers": [JsonHandler()]} if is_json() else {"stream": sys.stderr}
        logging.basicConfig(format="%(name)s: %(message)s", **as_lines)
        logging.getLogger("ragspec").setLevel(logging.DEBUG)


def overrides(override: list[str] | None, max_new_tokens: int | None = None) -> list[str]:
    """Return the `--set` overrides followed by those of flags that set a key, which therefore win."""
    answer_length = [] if max_new_tokens is None else [f"sampling.max_new_tokens={max_new_tokens}"]
    return [*(override or ()), *answer_length]


def settings_of(
    config: str | None, settings: list[str], override: list[str] | None = None, **direct: Any
) -> tuple[RunConfig, list[str], dict[str, Any]]:
    """Return what a command is to run: its config file's, if it has one, with its flags; notes; the values given.

    settings: the overrides that flags mean; they win over `override` (`--set`). direct: as in `load_config`.
    """
    from ragspec.cli.flags import method_for
    from ragspec.config.load import merged, read_config, redacted_config
    from ragspec.errors import ConfigError

    settings = [*(override or ()), *settings]
    given = dict(each.partition("=")[::2] for each in settings)
    if config is None and "model" not in given and given.get("runner") != "fake":
        raise ConfigError("--model: missing; name a model (demo, a hub id, a folder, a .gguf file), or give --config")
    raw, read_notes = read_config(config) if config else ({}, [])
    source = config or "command line"
    values, notes = merged(raw, source, [*method_for(settings, config=config is not None), *settings], **direct)
    run_config = redacted_config(values, source)
    redact = run_config.redactor()
    return run_config, [*read_notes, *map(redact, notes)], values


def unused_plugins(config: RunConfig, plugin: list[str] | None) -> list[str]:
    """Return the note that a config does not use the drafters of `--plugin`, if that is so."""
    if not plugin:
        return []
    from ragspec.speculation.methods import methods_of_files

    names, method = methods_of_files(), config.speculation.method
    if not names or method in names:
        return []
    return [f"--plugin: not used, because the method is {method}; to use it, add --method {' or '.join(names)}"]


def refuse_two_values(flag: str, given: Sequence[str]) -> None:
    """Raise ConfigError if a flag's KEY=VALUE texts give one key two values: the first would be ignored."""
    from ragspec.errors import ConfigError

    found: dict[str, str] = {}
    for key, _, value in (each.partition("=") for each in given):
        if found.setdefault(key, value) != value:
            raise ConfigError(f'--{flag}: "{key}" is given two values; keep one of them')  # not shown: maybe secrets


def input_of(path: str | list[str], columns: list[str] | None, **given: str) -> InputConfig:
    """Return files of records as an input, with the columns that `--columns` maps. given: other keys of the section."""
    from ragspec.cli.flags import pairs_of
    from ragspec.config.io import InputConfig
    from ragspec.config.load import override
    from ragspec.config.sections import validate

    raw: dict[str, Any] = {"input": {"path": path, **given}}
    for each in pairs_of("columns", "input.columns", columns or ()):
        override(raw, each, {})
    found = validate(InputConfig, raw["input"], "command line")
    assert isinstance(found, InputConfig)
    return found


def with_config(path: str | Path, plugin: list[str] | None) -> str:
    """Return the flags with which a command uses a config that was written to `path` (- is stdout)."""
    plugins = "".join(f" --plugin {each}" for each in plugin or ())
    return f"--config {'FILE' if str(path) == '-' else path}{plugins}"


def failures_allowed(given: str | None) -> Callable[[int], float]:
    """Return how many of so many records may fail, by what `--max-failures` was given. Raises ConfigError."""
    from ragspec.errors import ConfigError

    text = "0" if given is None else given.strip()
    share = text.endswith("%")
    try:
        most = float(text.removesuffix("%")) / 100 if share else int(text)
    except ValueError:
        most = -1
    if not (0 <= most <= 1 if share else most >= 0):
        raise ConfigError(f'--max-failures: "{given}" must be a number of records, or a share of them such as 2%')
    return lambda records: most * records if share else most


def scaled(workers: int | None, address: str | None) -> list[str]:
    """Return the overrides that mean these flags."""
    given = {"workers": workers, "address": address}
    return [f"scale.{key}={value}" for key, value in given.items() if value is not None]


def load(
    config: str | None,
    settings: list[str],
    override: list[str] | None,
    input: str | None,
    max_new_tokens: int | None = None,
) -> tuple[RunConfig, Console]:
    """Return the config, a runner chosen, and the console on stderr, with the config's notes printed there.

    settings: the overrides that flags mean.
    """
    from ragspec.cli.tables import print_notes, stderr
    from ragspec.run.inspect import with_columns
    from ragspec.run.runner_choice import choose_for_input

    console = stderr()
    run_config, notes, _ = settings_of(config, [*overrides(None, max_new_tokens), *settings], override, input=input)
    run_config, read_as = with_columns(run_config)
    choice = choose_for_input(run_config)
    print_notes(console, [*notes, *read_as, *([choice.why] if choice.why else [])])
    return choice.config, console


def print_table(rows: Sequence[Mapping[str, Any]], kind: str) -> None:
    """Print rows to stdout in the form that `--format` names."""
    from ragspec.report.table import written

    with quiet_pipe():
        sys.stdout.write(written(rows, kind))


@contextmanager
def quiet_pipe() -> Iterator[None]:
    """End the command quietly if the reader of its stdout has gone (`| head`)."""
    try:
        yield
    except BrokenPipeError:
        # silence the interpreter's own flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None


def retrieval_settings(
    console: Console, path: str | None, override: list[str] | None, *, builds: bool, **given: Any
) -> RetrievalConfig:
    """Return the retrieval section: the config's, if there is one, overridden by the command line."""
    from ragspec.cli.tables import print_notes
    from ragspec.config.load import load_retrieval

    direct = {key: value for key, value in given.items() if value is not None}
    settings, notes = load_retrieval(path, override or (), direct, builds=builds)
    print_notes(console, notes)
    return settings
