"""`ragspec doctor`: what this machine has, and what a config would do on it."""

from __future__ import annotations

from typing import Annotated

import typer

from ragspec.cli.flags import with_settings
from ragspec.cli.generate import SETTINGS
from ragspec.cli.options import Debug, InputOrStdin, Plugin, Set, set_debug, settings_of


@with_settings(*SETTINGS)
def doctor(
    settings: list[str],
    config: Annotated[
        str | None, typer.Option("--config", "-c", metavar="FILE", help="Config to check on this machine.")
    ] = None,
    input: InputOrStdin = None,
    clear_speeds: Annotated[
        bool, typer.Option("--clear-speeds", help="Delete the speeds of earlier runs, which runner: auto uses.")
    ] = False,
    plugin: Plugin = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Show what this machine has, and what a model or config would do on it."""
    from ragspec.cli.tables import print_hanging, stderr
    from ragspec.config.io import InputConfig
    from ragspec.config.redaction import Redactor
    from ragspec.run.doctor import Finding, examine_config, examine_input, examine_machine, examine_passages
    from ragspec.run.inspect import with_columns
    from ragspec.run.runner_choice import SPEEDS, forget

    set_debug(debug)
    findings = []
    if clear_speeds:
        findings.append(Finding("ok", f"cleared the speeds of {forget()} models in {SPEEDS.folder}"))
    findings += examine_machine()
    given: InputConfig | None = None
    if config is not None or settings or override:
        run_config, notes, _ = settings_of(config, settings, override, input=input)
        run_config, read_as = with_columns(run_config)
        given = run_config.input
        findings += examine_config(run_config, [*notes, *read_as])
        findings += examine_passages(run_config)
    elif input is not None:
        given = InputConfig(path=[input])
    if given is not None:
        findings.append(examine_input(given))
    redactor = Redactor(given.model_dump() if given is not None else {})
    console, styles = stderr(), {"ok": "green", "note": "yellow", "error": "red"}
    for finding in findings:
        print_hanging(console, f"{finding.level:5}", redactor(finding.text), styles[finding.level])
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(2)
