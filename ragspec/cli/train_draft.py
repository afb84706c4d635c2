"""`ragspec train-draft`: a draft for one's own records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragspec.cli.flags import WHAT, with_settings
from ragspec.cli.options import ConfigIfAny, Debug, Input, Limit, MaxNewTokens, Plugin, Set, load, set_debug


@with_settings(*WHAT, "batch_size")
def train_draft(
    settings: list[str],
    config: ConfigIfAny = None,
    input: Input = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the draft and its training data.")
    ] = Path("out/draft"),
    method: Annotated[
        str,
        typer.Option("--method", "-m", metavar="METHOD", help="What to train: draft_model, eagle3 or dflash."),
    ] = "draft_model",
    layers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Layers of the draft (2; for a head, its usual number)."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Passes over the answers.")] = 6,
    max_new_tokens: MaxNewTokens = None,
    limit: Limit = None,
    plugin: Plugin = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Train a draft model or head on your target's answers; test if it pays off."""
    from ragspec.cli.tables import learning_progress
    from ragspec.training.train import train_draft as train

    set_debug(debug)
    run_config, console = load(config, settings, override, input, max_new_tokens)
    with learning_progress(console) as progress:
        trained = train(
            run_config,
            output,
            method=method,
            layers=layers,
            epochs=epochs,
            limit=limit,
            console=console,
            progress=progress,
        )
    console.print(
        f"a draft ({trained.method}), trained on {trained.tokens:,} tokens of {trained.examples:,} answers in "
        f"{trained.training_s:.0f} s: {trained.draft}",
        markup=False,
    )
    console.print(trained.verdict(), markup=False)
    if trained.pays is not False:
        console.print(f"speculation: {{method: {trained.method}, draft_model: {trained.draft}}}", markup=False)
