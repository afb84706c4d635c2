"""`ragspec search`: the passages that an index finds for a question."""

from __future__ import annotations

from typing import Annotated

import typer

from ragspec.cli.options import Debug, OptionalConfig, Set, quiet_pipe, retrieval_settings, set_debug


def search(
    words: Annotated[str, typer.Argument(metavar="WORDS", help="A question, or words to find.")],
    index: Annotated[str | None, typer.Option(metavar="DIR", help="Index to search.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", "-k", metavar="N", help="Number of passages (5).")] = None,
    mode: Annotated[str | None, typer.Option(metavar="MODE", help="Search: auto, bm25, dense or hybrid.")] = None,
    reranker_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Cross-encoder that reorders the best passages.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object per passage.")] = False,
    config: OptionalConfig = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Show the passages in an index that match a question best."""
    import sys

    from ragspec.cli.answer_view import print_passage, stdout
    from ragspec.cli.tables import print_notes, stderr, waiting
    from ragspec.config.redaction import Redactor
    from ragspec.errors import ConfigError
    from ragspec.json_text import dumps
    from ragspec.outputs.answers import passage_fields

    set_debug(debug)
    if not words.strip():
        raise ConfigError("WORDS: must not be empty")
    console = stderr()
    found_as = {"top_k": top_k, "mode": mode, "reranker_model": reranker_model}
    settings = retrieval_settings(console, config, override, builds=False, index=index, **found_as)
    with quiet_pipe(), Redactor(settings.model_dump()).over_errors():
        with waiting(console, "searching"):
            from ragspec.retrieval.search import Retriever

            retriever = Retriever(settings)
            (hits,) = retriever.search([words])
        print_notes(console, retriever.notes())
        out = stdout()
        for number, hit in enumerate(hits, 1):
            if json:
                sys.stdout.write(dumps({**passage_fields(hit.passage), "document": hit.document}).decode() + "\n")
            else:
                print_passage(out, number, passage_fields(hit.passage), words=words)
    if not hits:
        console.print("no passage contains any of these words" if settings.mode != "dense" else "no passages")
