"""`ragspec retrieve`: contexts for records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ragspec.cli.options import (
    Columns,
    Debug,
    Limit,
    OptionalConfig,
    Set,
    input_of,
    quiet_pipe,
    retrieval_settings,
    set_debug,
)

if TYPE_CHECKING:
    pass


def retrieve(
    source: Annotated[str | None, typer.Argument(metavar="FILE|-", help="Same as --input.")] = None,
    index: Annotated[str | None, typer.Option(metavar="DIR", help="Index to search.")] = None,
    input: Annotated[
        str | None,
        typer.Option("--input", "-i", metavar="FILE|-", help="Records with queries, in any format; stdin by default."),
    ] = None,
    columns: Columns = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE|-", help="Where records go.")] = "-",
    top_k: Annotated[int | None, typer.Option("--top-k", "-k", metavar="N", help="Passages per query (5).")] = None,
    mode: Annotated[str | None, typer.Option(metavar="MODE", help="Search: auto, bm25, dense or hybrid.")] = None,
    reranker_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Cross-encoder that reorders the best passages.")
    ] = None,
    order: Annotated[
        str | None, typer.Option(metavar="ORDER", help="Passage order: score, or canonical (by id).")
    ] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Print recall, MRR and time instead; records need gold_doc_ids.")
    ] = False,
    config: OptionalConfig = None,
    limit: Limit = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Add retrieved passages to records that have none."""
    from ragspec.cli.tables import print_notes, stderr
    from ragspec.config.redaction import Redactor
    from ragspec.errors import ConfigError
    from ragspec.run.inspect import with_names
    from ragspec.run.retrieve import measure, stream

    set_debug(debug)
    if source is not None and input is not None:
        raise ConfigError(f"--input: given twice, as {source} and {input}; keep one of them")
    console = stderr()
    found_as = {"top_k": top_k, "mode": mode, "reranker_model": reranker_model, "order": order}
    settings = retrieval_settings(console, config, override, builds=False, index=index, **found_as)
    where = input_of(input or source or "-", columns)
    where, read_as = with_names(where, passages=False)
    print_notes(console, read_as)
    with quiet_pipe(), Redactor(settings.model_dump()).over_errors():
        if evaluate:
            print_notes(console, measure(settings, where, output, limit))
            return
        passed = stream(settings, where, output, limit)
    print_notes(console, passed.notes)
    if passed.untouched:
        note = f"{passed.untouched:,} lines have contexts or no query: passed on unchanged"
        console.print(f"note: {note}", markup=False)
    console.print(f"{passed.searched:,} queries, {passed.failed:,} error lines", markup=False)
    if passed.failed:
        raise typer.Exit(1)
