"""Build an index from a corpus: `build(config.retrieval)` -> BuildSummary.

Only new and changed documents are processed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ragspec.config.sections import RetrievalConfig
from ragspec.errors import ConfigError, flat
from ragspec.inputs.record_ids import KeySet
from ragspec.retrieval.corpus import (
    WORDS,
    Chunker,
    Document,
    NonDocument,
    Skipped,
    Unreadable,
    documents,
    model_tokens,
    passage_ids,
    plain,
    word_tokens,
)
from ragspec.retrieval.embedding import Embedder
from ragspec.retrieval.index import Chunk, Settings, Writer, building, check_language, failing, searched

log = logging.getLogger(__name__)
WRITTEN_AT_ONCE = 4096  # passages
SHOWN = 6  # file endings in a note
Report = Callable[["BuildSummary"], None]
Complain = Callable[[Skipped], None]


@dataclass(slots=True)
class BuildSummary:
    """Result of a build. Counts are of documents, except `chunks` and `chunks_written`."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    skipped: int = 0
    chunks: int = 0  # in the finished index
    chunks_written: int = 0
    seconds: float = 0.0
    non_documents: Counter[str] = field(default_factory=Counter)  # other files in folders, by ending
    notes: list[str] = field(default_factory=list)

    @property
    def seen(self) -> int:
        """Return how many documents were processed or skipped."""
        return self.added + self.changed + self.unchanged + self.skipped


def build(
    config: RetrievalConfig,
    report: Report = lambda _: None,
    complain: Complain = lambda _: None,
    embedder_of: Callable[[str], Embedder] = Embedder,
) -> BuildSummary:
    """Update the index at `config.index` from `config.corpus`, and return a summary.

    Args:
        config: the retrieval section.
        report: called with the summary after every document.
        complain: called for each skipped document.
        embedder_of: makes the embedder of a model by name.

    Raises:
        ConfigError: nothing can be indexed; the index is unchanged.
    """
    started = time.perf_counter()
    summary = BuildSummary()
    check_language(config.language)
    embedder = embedder_of(config.embedding_model) if config.embedding_model else None
    chunker, settings = _prepare(config, embedder, summary)
    with building(config.index), failing(config.index, "written"):
        writer = Writer(config.index, config.storage_options, settings, embedder.probe if embedder else None)
        had = writer.rows
        known = dict(writer.known())
        if damaged := writer.drop_damaged():
            summary.notes.append(f"{config.index}: its full-text index was damaged, and is built again")
        if had and writer.begins_anew:
            changed = f'another model named "{config.embedding_model}"' if writer.other_model else "different settings"
            summary.notes.append(f"{config.index}: built with {changed}; all documents are processed again")
        pending: list[Chunk] = []
        stale: list[str] = []
        seen = KeySet()
        kept_all = ""  # an unreadable part of the corpus that may contain known documents

        def write() -> None:
            if pending:
                writer.add(pending, embedder and embedder.documents([searched(c.title, c.text) for c in pending]))
                summary.chunks_written += len(pending)
                pending.clear()

        for item in documents(config.corpus, config.file_types):
            if isinstance(item, NonDocument):
                summary.non_documents[item.ending or "without an ending"] += 1
                continue
            try:
                pending += _chunks(item, seen, known, stale, chunker, summary)
            except _Skip as reason:
                summary.skipped += 1
                complain(reason.skipped)
                known.pop(reason.skipped.id or "", None)
                kept_all = kept_all or (reason.skipped.where if reason.skipped.many else "")
            if len(pending) >= WRITTEN_AT_ONCE:
                write()
            report(summary)
        write()
        if not summary.seen - summary.skipped:
            raise ConfigError(f"--corpus: {', '.join(config.corpus)}: contains no documents; the index is unchanged")
        if summary.non_documents:
            counts = ", ".join(f"{count:,} {ending}" for ending, count in summary.non_documents.most_common(SHOWN))
            summary.notes.append(
                f"{summary.non_documents.total():,} files are not documents and were left out ({counts})"
            )
        if kept_all:
            summary.notes.append(f"{kept_all}: could not be read, so no documents are removed from the index")
        else:
            summary.removed = len(known)
            stale += known.values()
        if stale:
            writer.remove(stale)
        if stale or summary.chunks_written or damaged:
            writer.finish()
        summary.chunks = writer.rows
    summary.seconds = time.perf_counter() - started
    return summary


class _Skip(Exception):
    def __init__(self, skipped: Skipped) -> None:
        self.skipped = skipped


def _chunks(
    item: Document | Skipped,
    seen: KeySet,
    known: dict[str, str],
    stale: list[str],
    chunker: Chunker,
    summary: BuildSummary,
) -> list[Chunk]:
    """Return the passages of a new or changed document. `known` keeps only documents not seen in the corpus."""
    if isinstance(item, Skipped):
        raise _Skip(item)
    if item.id in seen:
        raise _Skip(Skipped(item.where, f'id "{item.id}" appears twice; the first document with that id is kept'))
    if known.get(item.id) == item.digest:
        seen.add(item.id)
        del known[item.id]
        summary.unchanged += 1
        return []
    try:
        text = item.read()
        texts = chunker.split(text)
    except Unreadable as error:
        raise _Skip(Skipped(item.where, str(error))) from None
    except Exception as error:  # parsers of file formats may raise anything
        log.debug("%s cannot be read", item.where, exc_info=error)
        why = f"cannot be read ({type(error).__name__}: {flat(error, 120)})"
        raise _Skip(Skipped(item.where, why)) from None
    if not texts:
        raise _Skip(Skipped(item.where, "empty: contains no text"))
    seen.add(item.id)
    if (before := known.pop(item.id, None)) is None:
        summary.added += 1
    else:
        summary.changed += 1
        stale.append(before)
    names = passage_ids(item.id, len(texts))
    return [Chunk(name, item.id, item.digest, text.title, chunk) for name, chunk in zip(names, texts, strict=True)]


def _prepare(config: RetrievalConfig, embedder: Embedder | None, summary: BuildSummary) -> tuple[Chunker, Settings]:
    """Return the chunker and the index's settings. Passages must fit: embedding models truncate silently."""
    size = config.chunk_size
    if embedder and embedder.tokens is not None:
        if config.tokenizer:
            raise ConfigError(
                "retrieval.tokenizer: has no effect with embedding_model, which counts its own tokens; remove it"
            )
        tokens = plain(embedder.tokens)
    elif config.tokenizer:
        tokens = model_tokens(config.tokenizer)
    else:
        tokens = word_tokens()
    if embedder and embedder.max_tokens and size > (room := embedder.max_tokens - 2):
        size = room
        summary.notes.append(
            f"chunk_size: {room} instead of {config.chunk_size}: {config.embedding_model} reads no more"
        )
    overlap = min(config.chunk_overlap, size // 2)
    settings = Settings(
        chunk_size=size,
        chunk_overlap=overlap,
        tokenizer=config.tokenizer or (config.embedding_model and "embedding_model") or WORDS,
        language=config.language,
        embedding_model=config.embedding_model,
        dimension=embedder.dimension if embedder else None,
    )
    return Chunker(tokens, size, overlap), settings
