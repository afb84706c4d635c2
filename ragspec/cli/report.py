"""`ragspec report`: a benchmark's report, drawn again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragspec.cli.options import (
    Debug,
    set_debug,
)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Output folder of a finished benchmark.")],
    answers: Annotated[
        bool, typer.Option(help="Show answers token by token, with their questions and passages.")
    ] = True,
    debug: Debug = False,
) -> None:
    """Redraw the report of a finished benchmark."""
    from ragspec.benchmark.results import read_results
    from ragspec.cli.tables import stderr
    from ragspec.report.page import write_report

    set_debug(debug)
    stderr().print(f"report in {write_report(read_results(folder), folder, quote=answers)}", markup=False)
