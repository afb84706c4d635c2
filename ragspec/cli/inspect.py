"""`ragspec inspect`: what an input holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from ragspec.cli.options import Columns, Debug, set_debug


def inspect(
    path: Annotated[list[str], typer.Argument(metavar="INPUT", help="Files, folders, patterns, or a dataset.")],
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="jsonl, json, csv, tsv, text, parquet, arrow or dataset; auto detects it from the content.",
        ),
    ] = "auto",
    split: Annotated[str | None, typer.Option(metavar="SPLIT", help="Split of the dataset.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Configuration of the dataset.")] = None,
    columns: Columns = None,
    debug: Debug = False,
) -> None:
    """Show what an input contains and how ragspec reads it."""
    import sys

    import yaml
    from rich.padding import Padding
    from rich.text import Text

    from ragspec.cli.options import input_of, quiet_pipe
    from ragspec.cli.tables import stderr
    from ragspec.config.redaction import Redactor
    from ragspec.run.inspect import inspect as look

    set_debug(debug)
    asked = {key: value for key, value in {"format": format, "split": split, "name": name}.items() if value is not None}
    config = input_of(path, columns, **asked)
    redactor = Redactor(config.model_dump())
    with redactor.over_errors():
        found = look(config)
    console = stderr()
    rows = "" if found.rows is None else f", {found.rows:,} row{'' if found.rows == 1 else 's'}"
    console.print(f"{config}{rows}", markup=False)
    for column, kind in found.columns.items():
        console.print(f"  {column}: {kind}", markup=False)
    if found.mapping and not columns:
        flags = " ".join(f"--columns {field}={theirs}" for field, theirs in flattened(found.mapping))
        console.print(f"input.columns, or {flags}:", markup=False)
        with quiet_pipe():
            given = {"path": path, **{key: value for key, value in asked.items() if value != "auto"}}
            yaml.safe_dump({"input": {**given, "columns": found.mapping}}, sys.stdout, sort_keys=False)
        return
    if found.record is None:
        console.print(f"the first row is not a record: {redactor(found.error)}", markup=False, style="yellow")
        raise typer.Exit(1)
    record = found.record
    for field in ("id", "query", "messages", "prompt"):
        if (value := getattr(record, field)) is not None:
            console.print(f"first record, {field}: {_short(value)}", markup=False)
    console.print(f"first record, contexts: {len(record.contexts)}", markup=False)
    for passage in record.contexts[:PASSAGES]:
        title = f" ({_short(passage.title)})" if passage.title else ""
        shown = Text(f"{passage.id}{title}: {_short(passage.text)}")
        console.print(Padding.indent(shown, 2) if console.is_terminal else f"  {shown}", markup=False)


PASSAGES = 3  # of the first record
SHOWN = 200  # characters of a value


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def flattened(mapping: Mapping[str, str | Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield a mapping as `--columns` takes it: contexts, contexts.text."""
    for field, theirs in mapping.items():
        if isinstance(theirs, str):
            yield field, theirs
        else:
            yield field, theirs.get("path", field)
            yield from ((f"{field}.{inner}", name) for inner, name in theirs.items() if inner != "path")
