"""`ragspec evaluate`: how good answers are, and how two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ragspec.cli.options import Columns, Debug, Format, Set, input_of, overrides, print_table, quiet_pipe, set_debug

if TYPE_CHECKING:
    from rich.console import Console

    from ragspec.quality.evaluate import Evaluation


def evaluate(
    answers: Annotated[str, typer.Argument(metavar="ANSWERS", help="Output of a run.")],
    references: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Records with `reference`, matched by id; by default, the answers' metadata."
        ),
    ] = None,
    columns: Columns = None,
    against: Annotated[
        str | None, typer.Option(metavar="ANSWERS", help="Output of another run over the same records.")
    ] = None,
    refusal: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Pattern for refusals; by default, common English phrases.")
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="Config of a model that also judges answers; needs --references."),
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help='Condition on a score ("f1 >= 60") or, with a sign, on its difference ("f1 >= -0.5"); repeatable. '
            "Exit code 1: failed; 4: undecided.",
        ),
    ] = None,
    by_record: Annotated[
        str | None,
        typer.Option("--by-record", metavar="FILE", help="Also write each record's scores: .jsonl or .csv."),
    ] = None,
    log_to: Annotated[
        list[str] | None,
        typer.Option("--log-to", metavar="TRACKER", help="Also log the figures to mlflow or wandb; repeatable."),
    ] = None,
    format: Format = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Score answers against references, or compare two runs."""
    import sys
    from contextlib import suppress

    import orjson

    from ragspec.cli.tables import print_notes, stderr
    from ragspec.errors import ConfigError
    from ragspec.json_text import dumps
    from ragspec.quality.evaluate import evaluate as score
    from ragspec.quality.gates import exit_code, parse_gate
    from ragspec.quality.graded import REFUSAL
    from ragspec.quality.trackers import check_trackers, track
    from ragspec.report.table import check_format, check_table, write_table

    set_debug(debug)
    check_format(format)
    gates = [parse_gate(each) for each in gate or ()]
    check_trackers(log_to or ())
    if by_record is not None:
        check_table(by_record, "--by-record")
        _check_unread(by_record, [path for path in (answers, references, against) if path is not None])
    config = None
    if judge is not None:
        from ragspec.config.load import load_config
        from ragspec.inputs.storage import advising

        with advising("--judge takes the path of a YAML file"):
            config, _ = load_config(judge, overrides(override))
    if columns and references is None:
        raise ConfigError("--columns applies to --references; give that file too")
    given = None if references is None else input_of(references, columns)
    found = score(answers, references=given, against=against, refusal=refusal or REFUSAL, judge=config, gates=gates)
    console = stderr()
    print_notes(console, found.notes)
    if by_record is not None:
        write_table(by_record, found.record_rows())
    with suppress(typer.Exit):  # a reader of stdout that has gone; the gates count all the same
        if format not in (None, "json"):
            print_table(found.rows(), str(format))
        else:
            _print(console, found)
            if format is None and console.is_terminal and sys.stdout.isatty():
                raise typer.Exit  # the table is on this screen already
            with quiet_pipe():
                sys.stdout.write(dumps(found.to_json(), option=orjson.OPT_INDENT_2).decode() + "\n")
                sys.stdout.flush()
    for verdict in found.verdicts:
        console.print(verdict.formatted(), markup=False)
    track(found, log_to or ())
    if code := exit_code(found.verdicts):
        raise typer.Exit(code)


def _check_unread(by_record: str, read: Sequence[str]) -> None:
    """Raise ConfigError if the table of scores would replace a file that this command reads."""
    from ragspec.errors import ConfigError
    from ragspec.host.files import is_among

    if is_among(by_record, read):
        raise ConfigError(f"--by-record: {by_record} is read here, and would be overwritten; choose another name")


def _print(console: Console, found: Evaluation) -> None:
    """Print the scores as a table."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("score", "mean (95%)", "records", *(["difference (95%)"] if found.other else [])):
        table.add_column(column, justify="left" if column == "score" else "right", overflow="fold")
    for name, one in found.shown().items():
        cells = [name, one.formatted(), f"{one.count:,}"]
        if found.other and name in found.differences:
            cells.append(found.differences[name].formatted(sign=True))
        table.add_row(*cells)
    console.print(table)
    if found.agreement is not None:
        console.print(f"judge and F1 agree on {found.agreement.formatted()}% of the answers", markup=False)
    if found.speed is not None:
        console.print(
            f"{found.speed:.2f}x the other run's tokens/s, according to the statistics next to both", markup=False
        )
