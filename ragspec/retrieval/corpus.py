"""Files and folders -> documents: `for item in documents(["docs", "faq.jsonl"]): item.id, item.read()`.

A document that cannot be read is a `Skipped` with the reason, never an exception: one bad file of a thousand must not
end a build. Limit: a file must fit in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ragspec.config.places import InputConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import Row
from ragspec.inputs.content import DAMAGES, PACKED, failure_reason, unpacked
from ragspec.inputs.opening import open_source
from ragspec.inputs.values import id_text
from ragspec.retrieval.chunks import looks_numbered
from ragspec.retrieval.readers import Text, is_binary, read_text, reader_of

JSONL = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Document:
    """One document. `id` is the same in every build; `digest` changes with the content; `read` raises Unreadable."""

    id: str
    where: str  # for messages: a file, or file:line
    digest: str
    read: Callable[[], Text]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A document that is left out, and why."""

    where: str
    why: str
    id: str | None = None  # if known, and its passages may stay in the index: it could not be read
    many: bool = False  # whether it may hide documents that nobody knows of


@dataclass(frozen=True, slots=True)
class NonDocument:
    """A file in a folder that is no document: a photo, a program. ending: of its name."""

    ending: str


def documents(paths: Sequence[str], file_types: Sequence[str] = ()) -> Iterator[Document | Skipped | NonDocument]:
    """Yield the documents of `paths`: files, and folders with everything in them except hidden files and folders.

    file_types: endings to take from folders (".md"); all by default. Raises ConfigError for a path that is not there.
    """
    roots = [Path(path).expanduser() for path in paths]
    for root in roots:
        if not root.exists():
            raise ConfigError(f"--corpus: {root}: no such file or folder")
    wanted = tuple(f".{ending.lstrip('.').lower()}" for ending in file_types)
    for root in roots:
        if not root.is_dir():
            yield from _of_file(root, root.name)
            continue
        for item in _files(root):
            if isinstance(item, Skipped):
                yield item
            elif not wanted or item.name.lower().endswith(wanted) or _unpacked(item.name).endswith(wanted):
                yield from _of_file(item, item.relative_to(root).as_posix(), asked_for=bool(wanted))


def _files(root: Path) -> Iterator[Path | Skipped]:
    """Yield the files of a folder in the order of their paths, and what cannot be looked into."""
    unreadable: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=unreadable.append):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if (here / name).is_symlink():
                yield Skipped(str(here / name), "a link to a folder; add that folder to the corpus instead")
        yield from (here / name for name in sorted(files) if not name.startswith("."))
    for error in unreadable:
        yield Skipped(str(error.filename), f"cannot be read ({error.strerror})", many=True)


def _unpacked(name: str) -> str:
    """Return a file's name in small letters, without the ending of a compression."""
    small = name.lower()
    return small.removesuffix(next((ending for ending in PACKED if small.endswith(ending)), ""))


def _of_file(file: Path, name: str, *, asked_for: bool = True) -> Iterator[Document | Skipped | NonDocument]:
    """Yield the documents of a file. asked_for: by its name or its type, and not as one of a folder."""
    try:
        name.encode()
    except UnicodeEncodeError:
        yield Skipped(ascii(str(file)), "its name is not UTF-8; rename it")
        return
    if _unpacked(name).endswith(JSONL):
        yield from _of_jsonl(file, name)
        return
    try:
        if file.exists() and not file.is_file():
            yield Skipped(str(file), "not a regular file")
            return
        raw = file.read_bytes()
        content = unpacked(raw)
    except (OSError, *DAMAGES) as error:
        yield Skipped(str(file), failure_reason(error), id=name)
        return
    ending = Path(_unpacked(file.name) if content is not raw else file.name.lower()).suffix
    reader = reader_of(ending, content)
    if reader is None and not asked_for and is_binary(content):
        yield NonDocument(ending)
        return
    yield Document(name, str(file), _digest(name, ending, content), lambda: (reader or read_text)(content))


def _of_jsonl(file: Path, name: str) -> Iterator[Document | Skipped]:
    try:
        with open_source(InputConfig(path=[str(file)], format="jsonl")) as lines:
            for line in lines:
                try:
                    yield _of_line(line, file, name)
                except RecordError as error:
                    yield Skipped(lines.where(line.number), str(error))
    except ConfigError as error:  # a damaged archive: what came before the damage is kept
        yield Skipped(str(file), str(error).removeprefix(f"{file}:").strip(), many=True)


def _of_line(row: Row, file: Path, name: str) -> Document:
    value: Any = row.value
    if isinstance(value, RecordError):
        raise value
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise RecordError('a document is an object {"id", "title", "text"} with a text')
    key, title, text = value.get("id", value.get("_id")), value.get("title"), value["text"]  # _id: of BEIR's corpora
    if title is not None and not isinstance(title, str):
        raise RecordError('"title" must be a string')
    doc = id_text(key) or f"{name}:{row.number}"
    return Document(
        doc, f"{file}:{row.number}", _digest(doc, title or "", text.encode()), lambda: Text(text, title or None)
    )


def _digest(doc: str, form: str, content: bytes) -> str:
    """Return what changes with a document, and with the ids of its passages."""
    # these were not always numbered: documents in an older index are processed again
    numbered = "#\0" if looks_numbered(doc) else ""
    return blake2b(f"{doc}\0{form}\0{numbered}".encode() + content, digest_size=12).hexdigest()
