"""`ragspec verify`, `tune` and `doctor`: is it right, what is best, what would run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragspec.cli.options import Config, Debug, Input, Limit, Set, load, set_debug


def verify(
    config: Config,
    input: Input = None,
    limit: Limit = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Findings and answers.")] = Path(
        "out/verify"
    ),
    reference: Annotated[
        int, typer.Option(min=0, help="Records that stock transformers answers too, two at least; 0: none.")
    ] = 8,
    seed: Annotated[int, typer.Option(help="Draws these records.")] = 0,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Answer the input with and without speculation, a sample in stock transformers, and prove that nothing changed."""
    from ragspec.audit.findings import print_findings
    from ragspec.audit.verify import run_verify

    set_debug(debug)
    run_config, console = load(config, override, input)
    found = run_verify(run_config, output, limit=limit, console=console, reference=reference, seed=seed)
    print_findings(console, found, output)
    if found.failed:
        raise typer.Exit(1)


def tune(
    config: Config,
    input: Input = None,
    budget: Annotated[float, typer.Option(min=1, help="Seconds to spend, about.")] = 300,
    limit: Annotated[int, typer.Option(min=1, help="Records of the sample: the first so many.")] = 32,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The config to write.")] = Path(
        "tuned.yaml"
    ),
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Time the methods that could serve this config on a sample, and write the config of the fastest."""
    from tempfile import TemporaryDirectory

    from ragspec.benchmark import tune as tuning

    set_debug(debug)
    run_config, console = load(config, override, input)
    with TemporaryDirectory() as folder:
        tuned = tuning.tune(run_config, Path(folder), budget_s=budget, limit=limit, console=console)
    tuning.write_config(tuned, output, f"the first {limit} records of {run_config.input}")
    for line in tuned.evidence:
        console.print(line, markup=False)
    console.print(f"{tuned.winner.name} wins; its config is in {output}", markup=False)


def doctor(
    config: Annotated[str | None, typer.Option("--config", "-c", help="A config to examine on this machine.")] = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Say what this machine has, and what a config would do on it, before any weights load."""
    from ragspec.cli.console import stderr
    from ragspec.run.doctor import examine_config, examine_machine

    set_debug(debug)
    findings = list(examine_machine())
    if config is not None:
        from ragspec.config.load import load_config

        findings += examine_config(*load_config(config, override or ()))
    console, styles = stderr(), {"ok": "green", "note": "yellow", "error": "red"}
    for finding in findings:
        console.print(f"{finding.level:5} {finding.text}", markup=False, style=styles[finding.level])
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(2)
