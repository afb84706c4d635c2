"""`ragspec report`: a benchmark's report, drawn again; or two outputs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragspec.cli.options import Debug, Format, print_table, set_debug


def report(
    folder: Annotated[str, typer.Argument(metavar="DIR|ANSWERS", help="A benchmark's folder, or a run's output.")],
    other: Annotated[
        str | None, typer.Argument(metavar="ANSWERS", help="Another run's output to compare with.")
    ] = None,
    answers: Annotated[
        bool, typer.Option(help="Show answers token by token, with their questions and passages.")
    ] = True,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Side-by-side page to write.")] = Path(
        "side-by-side.html"
    ),
    format: Format = None,
    debug: Debug = False,
) -> None:
    """Redraw the report of a benchmark, or show two runs' answers side by side."""
    from ragspec.benchmark.details import table_of
    from ragspec.benchmark.results import read_results
    from ragspec.cli.tables import stderr
    from ragspec.report.page import write_report
    from ragspec.report.side_by_side import write_pairs
    from ragspec.report.table import check_format

    set_debug(debug)
    check_format(format)
    if other is not None:
        compared = write_pairs(folder, other, output)
        stderr().print(f"{compared.verdict}; page in {output}", markup=False)
        if format is not None:
            print_table(compared.rows(), format)
        return
    results = read_results(Path(folder))
    if format is not None:
        print_table(table_of(results), format)
    stderr().print(f"report in {write_report(results, Path(folder), quote=answers)}", markup=False)
