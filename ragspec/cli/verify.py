"""`ragspec verify`: the proof that speculation changes no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragspec.cli.flags import WHAT, with_settings
from ragspec.cli.options import ConfigIfAny, Debug, Input, Limit, MaxNewTokens, Plugin, Set, load, set_debug


@with_settings(*WHAT, "runner", "method", "draft_model", "batch_size")
def verify(
    settings: list[str],
    config: ConfigIfAny = None,
    input: Input = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for findings and answers.")
    ] = Path("out/verify"),
    max_new_tokens: MaxNewTokens = None,
    limit: Limit = None,
    reference: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Records to also answer with stock transformers (at least 2; 0 for none)."
        ),
    ] = 8,
    seed: Annotated[int, typer.Option(metavar="SEED", help="Seed for choosing the --reference records.")] = 0,
    bits: Annotated[
        bool,
        typer.Option(
            "--bits",
            help="Answer twice more and compare log-probabilities bit for bit; always on with runner_args.exact.",
        ),
    ] = False,
    plugin: Plugin = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Check that speculation changes no answer."""
    from ragspec.audit.lossless import print_findings
    from ragspec.audit.verify import run_verify

    set_debug(debug)
    run_config, console = load(config, settings, override, input, max_new_tokens)
    found = run_verify(run_config, output, limit=limit, console=console, reference=reference, seed=seed, bits=bits)
    print_findings(console, found, output)
    if found.failed:
        raise typer.Exit(1)
