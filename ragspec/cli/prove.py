"""`ragspec verify`, `tune` and `doctor`: whether answers are right, what is fastest, what would run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragspec.cli.options import Config, Debug, Input, InputOrStdin, Limit, MaxNewTokens, Set, load, overrides, set_debug


def verify(
    config: Config,
    input: Input = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where findings and answers go.")
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
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Check that speculation changes no answer."""
    from ragspec.audit.lossless import print_findings
    from ragspec.audit.verify import run_verify

    set_debug(debug)
    run_config, console = load(config, override, input, max_new_tokens)
    found = run_verify(run_config, output, limit=limit, console=console, reference=reference, seed=seed)
    print_findings(console, found, output)
    if found.failed:
        raise typer.Exit(1)


def tune(
    config: Config,
    input: Input = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the fastest config goes.")
    ] = Path("tuned.yaml"),
    max_new_tokens: MaxNewTokens = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Read only the first N records.")] = 32,
    budget: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Roughly how long to spend.")] = 300,
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="WHAT",
            help="Also time what may change answers (order, passages, dtype, quantization); repeatable. "
            "Records need references.",
        ),
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="POINTS",
            help="Let an option of --try win if its F1 loss, interval included, is at most this.",
        ),
    ] = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Find the fastest method for a config, and write a config that uses it."""
    from tempfile import TemporaryDirectory

    from ragspec.benchmark import tune as tuning

    set_debug(debug)
    run_config, console = load(config, override, input, max_new_tokens)
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
    console.print(f"{tuned.verdict}; its config is in {output}", markup=False)


def doctor(
    config: Annotated[
        str | None, typer.Option("--config", "-c", metavar="FILE", help="Config to examine on this machine.")
    ] = None,
    input: InputOrStdin = None,
    clear_speeds: Annotated[
        bool, typer.Option("--clear-speeds", help="Forget the speeds of earlier runs, which runner: auto goes by.")
    ] = False,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Show what this machine has, and what a config would do on it."""
    from ragspec.cli.tables import stderr
    from ragspec.config.io import InputConfig
    from ragspec.config.redaction import Redactor
    from ragspec.run.doctor import Finding, examine_config, examine_input, examine_machine, examine_passages
    from ragspec.run.runner_choice import SPEEDS, forget

    set_debug(debug)
    findings = []
    if clear_speeds:
        findings.append(Finding("ok", f"cleared the speeds of {forget()} models in {SPEEDS.folder}"))
    findings += examine_machine()
    given: InputConfig | None = None
    if config is not None:
        from ragspec.config.load import load_config

        run_config, notes = load_config(config, overrides(override), input=input)
        given = run_config.input
        findings += examine_config(run_config, notes)
        findings += examine_passages(run_config)
    elif input is not None:
        given = InputConfig(path=[input])
    if given is not None:
        findings.append(examine_input(given))
    redactor = Redactor(given.model_dump() if given is not None else {})
    console, styles = stderr(), {"ok": "green", "note": "yellow", "error": "red"}
    for finding in findings:
        console.print(f"{finding.level:5} {redactor(finding.text)}", markup=False, style=styles[finding.level])
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(2)
