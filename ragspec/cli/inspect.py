"""`ragspec inspect`: what an input holds."""

from __future__ import annotations

from typing import Annotated

import typer

from ragspec.cli.options import Debug, set_debug


def inspect(
    path: Annotated[list[str], typer.Argument(metavar="INPUT", help="Files, folders, patterns, or a dataset.")],
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="jsonl, json, csv, tsv, parquet, arrow or dataset; auto goes by the content."
        ),
    ] = "auto",
    split: Annotated[str | None, typer.Option(metavar="SPLIT", help="Split of the dataset.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Configuration of the dataset.")] = None,
    debug: Debug = False,
) -> None:
    """Show what an input contains, and how ragspec reads it."""
    import sys

    import yaml

    from ragspec.cli.options import quiet_pipe
    from ragspec.cli.tables import stderr
    from ragspec.config.io import InputConfig
    from ragspec.config.redaction import Redactor
    from ragspec.config.sections import validate
    from ragspec.run.inspect import inspect as look

    set_debug(debug)
    given = {"path": path, "format": format, "split": split, "name": name}
    config = validate(InputConfig, {key: value for key, value in given.items() if value is not None}, "command line")
    assert isinstance(config, InputConfig)
    redactor = Redactor(config.model_dump())
    with redactor.over_errors():
        found = look(config)
    console = stderr()
    rows = "" if found.rows is None else f", {found.rows:,} rows"
    console.print(f"{config}{rows}", markup=False)
    for column, kind in found.columns.items():
        console.print(f"  {column}: {kind}", markup=False)
    if found.mapping:
        with quiet_pipe():
            asked = {key: value for key, value in given.items() if value not in (None, "auto")}
            yaml.safe_dump({"input": {**asked, "columns": found.mapping}}, sys.stdout, sort_keys=False)
        return
    if found.record is None:
        console.print(f"the first row is not a record: {redactor(found.error)}", markup=False, style="yellow")
        raise typer.Exit(1)
    record = found.record
    fields = {"query": record.query, "messages": record.messages, "prompt": record.prompt}
    for field, value in {"id": record.id, **fields, "contexts": len(record.contexts)}.items():
        if value is not None:
            console.print(f"first record, {field}: {str(value)[:200]}", markup=False)
