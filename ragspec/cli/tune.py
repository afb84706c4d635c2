"""`ragspec tune`: the fastest method for a config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragspec.cli.flags import WHAT, with_settings
from ragspec.cli.options import (
    ConfigIfAny,
    Debug,
    Format,
    Input,
    MaxNewTokens,
    Plugin,
    Set,
    load,
    print_table,
    set_debug,
)

if TYPE_CHECKING:
    from ragspec.config.run import RunConfig


@with_settings(*WHAT, "runner", "draft_model", "batch_size")
def tune(
    settings: list[str],
    config: ConfigIfAny = None,
    input: Input = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File for the fastest config.")] = Path(
        "tuned.yaml"
    ),
    max_new_tokens: MaxNewTokens = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Read only the first N records.")] = 32,
    budget: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Approximate time to spend.")] = 300,
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="WHAT",
            help="Also time options that may change answers (order, passages, dtype, quantization); repeatable. "
            "Records need references.",
        ),
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="POINTS",
            help="Accept a --try option if its F1 loss, interval included, is at most this.",
        ),
    ] = None,
    format: Format = None,
    plugin: Plugin = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Find the fastest method for a config, and write a config that uses it."""
    from tempfile import TemporaryDirectory

    from ragspec.benchmark import tune as tuning
    from ragspec.report.table import check_format

    set_debug(debug)
    check_format(format)
    run_config, console = load(config, settings, override, input, max_new_tokens)
    _check_output(output, run_config)
    with TemporaryDirectory() as folder:
        tuned = tuning.tune(
            run_config,
            Path(folder),
            budget_s=budget,
            limit=limit,
            console=console,
            tries=tries or (),
            max_loss=max_loss,
        )
    tuning.write_config(tuned, output, f"the first {limit} records of {run_config.input}")
    for line in tuned.evidence:
        console.print(line, markup=False)
    if format is not None:
        print_table(tuned.figures, format)
    console.print(f"{tuned.verdict}; its config is in {output}", markup=False)


def _check_output(path: Path, config: RunConfig) -> None:
    """Raise ConfigError if the tuned config cannot go to `path`, or would replace anything but a config."""
    from ragspec.config.load import read_config
    from ragspec.config.redaction import revealed
    from ragspec.errors import ConfigError
    from ragspec.host.files import is_among

    if path.is_dir():
        raise ConfigError(f"--output: {path} is a folder; give the name of a file")
    used = [*(revealed(config.input.path) if config.input else ()), str(revealed(config.output.path))]
    if is_among(path, used):
        raise ConfigError(f"--output: {path} is the input or output of the config; choose another name")
    if path.is_file() and path.stat().st_size:
        try:
            replaceable = "speculation" in read_config(str(path))[0]
        except ConfigError:
            replaceable = False
        if not replaceable:
            raise ConfigError(f"--output: {path} exists and is no config of `ragspec tune`; choose another name")
