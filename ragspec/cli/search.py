"""`ragspec index` and `ragspec retrieve`: from documents to contexts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragspec.cli.options import Columns, Debug, Limit, RayAddress, Set, input_of, quiet_pipe, set_debug

if TYPE_CHECKING:
    from rich.console import Console

    from ragspec.config.sections import RetrievalConfig

OptionalConfig = Annotated[
    str | None, typer.Option("--config", "-c", metavar="FILE", help="Config with a retrieval section.")
]


def index(
    more: Annotated[list[str] | None, typer.Argument(metavar="FILE", help="The same as --corpus.")] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Documents: JSONL of {id, title, text}, text, Markdown, HTML, PDF, Word, folders."
        ),
    ] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="DIR", help="Where the index goes.")] = None,
    config: OptionalConfig = None,
    chunk_size: Annotated[int | None, typer.Option(metavar="N", help="Longest passage, in tokens (512).")] = None,
    chunk_overlap: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens that adjacent passages may share (64).")
    ] = None,
    embedding_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="sentence-transformers model: hub id, folder or demo. Without one, search is by keyword.",
        ),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="MODEL", help="Model whose tokens are counted.")] = None,
    language: Annotated[
        str | None, typer.Option(metavar="NAME", help="Language for stemming and stop words (English), or none.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, metavar="N", help="Embed on N workers, on this machine or a Ray cluster."),
    ] = None,
    ray_address: RayAddress = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Build a retrieval index, or update it with new and changed documents."""
    from ragspec.cli.tables import build_progress, print_build, stderr
    from ragspec.config.redaction import Redactor
    from ragspec.config.sections import ScaleConfig
    from ragspec.errors import ConfigError
    from ragspec.retrieval.build import build
    from ragspec.retrieval.embedding import Embedder

    set_debug(debug)
    console = stderr()
    settings = _settings(
        console,
        config,
        override,
        builds=True,
        index=output,
        corpus=[*(corpus or ()), *(more or ())] or None,
        chunk_size=chunk_size,
        chunk_overlap=chunk_overlap,
        embedding_model=embedding_model,
        tokenizer=tokenizer,
        language=language,
    )
    if not settings.corpus:
        raise ConfigError("--corpus: missing; give files or folders, or retrieval.corpus in the config")
    with ExitStack() as stack:
        stack.enter_context(Redactor(settings.model_dump()).over_errors())
        embedder_of: Callable[[str], Embedder] = Embedder
        if settings.embedding_model and (workers or ray_address):
            from ragspec.run.ray.cluster import embedders

            scale = ScaleConfig(workers=workers or 1, address=ray_address or "local")
            embedder_of = stack.enter_context(embedders(scale))
        report, complain = stack.enter_context(build_progress(console))
        summary = build(settings, report, complain, embedder_of)
    print_build(console, summary, settings.index)
    if summary.skipped:
        raise typer.Exit(1)


def retrieve(
    source: Annotated[str | None, typer.Argument(metavar="FILE|-", help="The same as --input.")] = None,
    index: Annotated[str | None, typer.Option(metavar="DIR", help="Index to search.")] = None,
    input: Annotated[
        str | None,
        typer.Option("--input", "-i", metavar="FILE|-", help="Records with queries, in any format; stdin by default."),
    ] = None,
    columns: Columns = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE|-", help="Where the records go.")] = "-",
    top_k: Annotated[int | None, typer.Option("--top-k", "-k", metavar="N", help="Passages per query (5).")] = None,
    mode: Annotated[str | None, typer.Option(metavar="MODE", help="Search: auto, bm25, dense or hybrid.")] = None,
    reranker_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Cross-encoder that reorders the best passages.")
    ] = None,
    order: Annotated[
        str | None, typer.Option(metavar="ORDER", help="Order of passages: score, or canonical (by id).")
    ] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Print recall, MRR and time instead; records need gold_doc_ids.")
    ] = False,
    config: OptionalConfig = None,
    limit: Limit = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Add retrieved contexts to records that have none."""
    from ragspec.cli.tables import stderr
    from ragspec.config.redaction import Redactor
    from ragspec.run.retrieve import measure, stream

    set_debug(debug)
    console = stderr()
    found_as = {"top_k": top_k, "mode": mode, "reranker_model": reranker_model, "order": order}
    settings = _settings(console, config, override, builds=False, index=index, **found_as)
    where = input_of(input or source or "-", columns)
    with quiet_pipe(), Redactor(settings.model_dump()).over_errors():
        if evaluate:
            measure(settings, where, output, limit)
            return
        passed = stream(settings, where, output, limit)
    if passed.untouched:
        note = f"{passed.untouched:,} lines have contexts or no query: passed on unchanged"
        console.print(f"note: {note}", markup=False)
    console.print(f"{passed.searched:,} queries, {passed.failed:,} error lines", markup=False)
    if passed.failed:
        raise typer.Exit(1)


def _settings(
    console: Console, path: str | None, override: list[str] | None, *, builds: bool, **given: Any
) -> RetrievalConfig:
    """Return the retrieval section: the config's, if there is one, overridden by the command line."""
    from ragspec.cli.tables import print_notes
    from ragspec.config.load import load_retrieval

    direct = {key: value for key, value in given.items() if value is not None}
    settings, notes = load_retrieval(path, override or (), direct, builds=builds)
    print_notes(console, notes)
    return settings
