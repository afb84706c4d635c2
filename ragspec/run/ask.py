"""What `ragspec ask` finds passages in: files given as context, and folders that are indexed on the way.

>>> context_passages(["manual.pdf"])[0]["id"]
'manual.pdf#1'
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ragspec.config.run import RunConfig
from ragspec.config.sections import RetrievalConfig
from ragspec.errors import ConfigError
from ragspec.host.cache import cache_dir, digest_of
from ragspec.retrieval.build import Complain, Report, build
from ragspec.retrieval.corpus import (
    Chunker,
    Document,
    Skipped,
    Text,
    Unreadable,
    documents,
    passage_ids,
    read_text,
    word_tokens,
)

WHOLE = 2000  # characters of a text that is one passage
BUILT_WITH = {"file_types", "chunk_size", "chunk_overlap", "embedding_model", "tokenizer", "language"}
SYSTEM = "Answer from the passages. Quote them word for word where you can."


def checked_question(question: str) -> str:
    """Return a question without spaces around it. Raises ConfigError for an empty one, and one that is no text."""
    if not question.strip():
        raise ConfigError("QUESTION: must not be empty")
    if not question.isprintable() and any("\ud800" <= char <= "\udfff" for char in question):
        raise ConfigError("QUESTION: is not valid UTF-8; check the encoding of the terminal or script")
    return question.strip()


def for_questions(config: RunConfig, *, passages: bool) -> RunConfig:
    """Return a config for single questions: one row, and the question and passages in each line.

    passages: questions come with passages, so that a config without a system prompt gets one that says so.
    """
    changed: dict[str, Any] = {
        "output": config.output.model_copy(update={"include": ["query", "contexts"], "format": "auto"})
    }
    if "batch_size" not in config.runner_args and config.runner != "vllm":
        changed["runner_args"] = {**config.runner_args, "batch_size": 1}
    if passages and config.prompt.system is None and config.prompt.template is None:
        changed["prompt"] = config.prompt.model_copy(update={"system": SYSTEM})
    return config.model_copy(update=changed)


def context_passages(paths: Sequence[str], complain: Complain) -> list[dict[str, Any]]:
    """Return the passages of files, folders and stdin (-), in their order, as a record's contexts.

    complain: called for each file of a folder that is left out. Raises ConfigError.
    """
    found = []
    for path in paths:
        passages = [passage for name, text in _texts(path, complain) for passage in _passages_in(name, text)]
        if not passages:
            raise ConfigError(f"--context: {path}: contains no text")
        found += passages
    return found


def _passages_in(name: str, text: Text) -> Iterator[dict[str, Any]]:
    chunks = [text.text] if len(text.text) <= WHOLE else _chunker().split(text)
    title = {"title": text.title} if text.title else {}
    for each, chunk in zip(passage_ids(name, len(chunks)), chunks, strict=True):
        if chunk.strip():
            yield {"id": each, **title, "text": chunk}


def _texts(path: str, complain: Complain) -> Iterator[tuple[str, Text]]:
    """Yield the names and texts of a file's documents, or of a folder's."""
    if path != "-" and not os.path.exists(path):
        raise ConfigError(f"--context: {path}: no such file")
    stdin = Document("stdin", path, "", lambda: read_text(sys.stdin.buffer.read()))
    for item in [stdin] if path == "-" else documents([path]):
        found = _read(item) if isinstance(item, Document) else item
        if isinstance(found, tuple):
            yield found
        elif isinstance(found, Skipped) and os.path.isdir(path):
            complain(found)
        elif isinstance(found, Skipped):
            raise ConfigError(f"--context: {found.where}: {found.why}")


def _read(document: Document) -> tuple[str, Text] | Skipped:
    try:
        text = document.read()
    except Unreadable as error:
        return Skipped(document.where, str(error))
    return (document.id, text) if text.text.strip() else Skipped(document.where, "contains no text")


def _chunker() -> Chunker:
    size, overlap = (RetrievalConfig.model_fields[key].default for key in ("chunk_size", "chunk_overlap"))
    return Chunker(word_tokens(), size, overlap)


def indexes() -> str:
    """Return the folder of the indexes over what questions were asked about. It is in the user's cache."""
    return str(cache_dir() / "asked")


def indexed(
    corpus: Sequence[str], given: RetrievalConfig, report: Report, complain: Complain
) -> tuple[RetrievalConfig, list[str]]:
    """Return a retrieval section for an index over these files and folders, built or brought up to date, and notes.

    given: how to build and search it. The next question that asks for the same finds the index. Raises ConfigError.
    """
    paths = [os.path.abspath(os.path.expanduser(path)) for path in corpus]
    place = os.path.join(indexes(), digest_of([paths, given.model_dump(mode="json", include=BUILT_WITH)]))
    changed: dict[str, Any] = {"index": place, "corpus": list(corpus), "storage_options": {}}
    notes = []
    if given.mode in ("dense", "hybrid") and given.embedding_model is None:
        changed["mode"] = "auto"
        notes.append(f"retrieval.mode: auto instead of {given.mode}: --corpus has no vectors without embedding_model")
    section = given.model_copy(update=changed)
    build(section, report, complain)
    return section, notes
