"""`ragspec index`: documents to an index."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from ragspec.cli.options import (
    Debug,
    OptionalConfig,
    RayAddress,
    Set,
    retrieval_settings,
    set_debug,
)

if TYPE_CHECKING:
    pass


def index(
    more: Annotated[list[str] | None, typer.Argument(metavar="FILE", help="Same as --corpus.")] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Documents: text, Markdown, HTML, PDF, Word; JSONL, JSON, CSV, TSV of {id, title, text}; or folders.",
        ),
    ] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="DIR", help="Folder for the index.")] = None,
    config: OptionalConfig = None,
    chunk_size: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum passage length, in tokens (512).")
    ] = None,
    chunk_overlap: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens that adjacent passages may share (64; at most half)."),
    ] = None,
    embedding_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="sentence-transformers model: hub id, folder or demo. Without one, search is by keyword.",
        ),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="MODEL", help="Model whose tokenizer counts tokens.")] = None,
    language: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Language for stemming (English; it drops stop words), or none."),
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
    settings = retrieval_settings(
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
