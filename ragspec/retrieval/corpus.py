"""The corpus: files and folders as documents, their text, and passages of limited length.

>>> for item in documents(["docs", "faq.jsonl"]): item.id, item.read()

Files of JSON Lines, JSON, CSV and TSV have a document per record. Another format needs a reader and a line in READERS.
A document that cannot be read becomes a `Skipped` with the reason, not an exception: one bad file must not end a build.
Limit: a file that is one document must fit in memory.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from ragspec.config.io import InputConfig
from ragspec.errors import ConfigError, RecordError, flat
from ragspec.inputs.base import InputRow, Source
from ragspec.inputs.columns import Columns, listed
from ragspec.inputs.content import DAMAGES, PACKED, Stream, decoded, encoding_of, failure_reason, unpacked
from ragspec.inputs.sources import kind_of, open_source
from ragspec.inputs.text import TextSource
from ragspec.inputs.values import id_text, kind, names
from ragspec.models.resolve import brings_code, needs_code, resolve

NOT_CONTENT = ("script", "style", "noscript", "template", "nav")


class Unreadable(Exception):
    """A document without text; the message says why."""


@dataclass(frozen=True, slots=True)
class Text:
    """A document's text. markdown: split at headings and lists."""

    text: str
    title: str | None = None
    markdown: bool = False


def is_binary(content: bytes) -> bool:
    """Return whether a file is not text in any supported encoding."""
    return encoding_of(content[:4]) is None and b"\0" in content[:8192]


def read_text(content: bytes) -> Text:
    """Return UTF-8 or UTF-16 text unchanged."""
    if is_binary(content):
        raise Unreadable("a binary file, not text")
    try:
        return Text(decoded(content))
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 text (byte {error.start + 1}); if it is text, save it as UTF-8") from None


def read_markdown(content: bytes) -> Text:
    """Return Markdown with its first top-level heading as the title."""
    text = read_text(content).text
    heading = re.search(r"^# +(.+?)(?: +#+)? *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE)
    return Text(text, heading[1] if heading else None, markdown=True)


def read_html(content: bytes) -> Text:
    """Return a page as Markdown, without scripts, styles and navigation."""
    from bs4 import BeautifulSoup

    if is_binary(content):
        raise Unreadable("a binary file, not HTML")
    page = BeautifulSoup(decoded(content) if encoding_of(content[:4]) else content, "html.parser")
    title = page.title.get_text(" ", strip=True) if page.title else None
    for tag in page(NOT_CONTENT):
        tag.decompose()
    return Text(_markdown(page.body or page), title or None, markdown=True)


def read_docx(content: bytes) -> Text:
    """Return a Word document as Markdown: headings, lists and tables, without pictures and comments."""
    try:
        import mammoth
        from bs4 import BeautifulSoup
    except ImportError:
        raise Unreadable('reading Word documents needs mammoth: pip install "ragspec[retrieval]"') from None
    try:
        html = mammoth.convert_to_html(
            io.BytesIO(content),
            convert_image=lambda _: [],
            style_map="p[style-name='Title'] => h1:fresh",
            include_embedded_style_map=False,
        ).value
    except zipfile.BadZipFile:
        raise Unreadable("damaged, not a .docx, or encrypted: save it as .docx without a password") from None
    page = BeautifulSoup(html, "html.parser")
    title = page.h1.get_text(" ", strip=True) if page.h1 else None
    return Text(_markdown(page, table_infer_header=True), title or None, markdown=True)


def _markdown(page: Any, **options: Any) -> str:
    from markdownify import MarkdownConverter

    text: str = MarkdownConverter(heading_style="ATX", strip=["a", "img"], **options).convert_soup(page)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def read_pdf(content: bytes) -> Text:
    """Return the text of all pages. Raises Unreadable for a scan."""
    import pypdfium2

    try:
        pdf = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise Unreadable("encrypted: it needs a password; save it without one") from None
        raise Unreadable(f"damaged, or not a PDF ({error})") from None
    try:
        pages = [page.get_textpage().get_text_bounded() for page in pdf]
        title = str(pdf.get_metadata_dict().get("Title") or "").strip()
    except pypdfium2.PdfiumError as error:
        raise Unreadable(f"damaged ({error})") from None
    finally:
        pdf.close()
    # PDFium marks hyphens that only break a word at the end of a line
    text = re.sub("[\ufffe\x02]\\s*", "", "\n\n".join(pages).replace("\r\n", "\n"))
    if not text.strip():
        raise Unreadable("a PDF without text (a scan?); run text recognition on it first")
    return Text(text, title or None)


READERS: dict[str, Callable[[bytes], Text]] = {
    ".txt": read_text,
    ".md": read_markdown,
    ".markdown": read_markdown,
    ".html": read_html,
    ".htm": read_html,
    ".pdf": read_pdf,
    ".docx": read_docx,
}


def reader_of(suffix: str, content: bytes = b"") -> Callable[[bytes], Text] | None:
    """Return the reader of a file by its content or its name, None without one.

    >>> reader_of(".md")(b"# The pump").title
    'The pump'
    """
    if content.startswith(b"%PDF-"):
        return read_pdf
    if content.startswith(b"PK\x03\x04") and b"word/document.xml" in content:
        return read_docx
    return READERS.get(suffix)


# -- passages --------------------------------------------------------------------------------------

WORDS = "words"


def passage_ids(document: str, count: int) -> Sequence[str]:
    """Return the ids of a document's passages: its own id for a single passage, else `id#1`, `id#2`, ...

    A document whose id already has that form is always numbered, so passage ids are unique across documents.
    """
    if count == 1 and not looks_numbered(document):
        return [document]
    return [f"{document}#{number}" for number in range(1, count + 1)]


def looks_numbered(document: str) -> bool:
    """Return whether a document's id could be a passage id of another document."""
    return re.search(r"#[1-9][0-9]*\Z", document) is not None


class Chunker:
    """Splits documents into passages of at most `size` tokens, title included, that share up to `overlap` tokens.

    tokens: a `tokenizers.Tokenizer`. A passage ends inside a word only if the word alone is too long.
    Splits at sentences, paragraphs or headings by the rules of the semantic-text-splitter library.
    """

    def __init__(self, tokens: Any, size: int, overlap: int) -> None:
        self._tokens = tokens
        self._size = size
        self._overlap = overlap
        self._splitter = lru_cache(maxsize=64)(self._make_splitter)

    def split(self, text: Text) -> list[str]:
        """Return a document's passages in order, none without text."""
        title = len(self._tokens.encode(text.title, add_special_tokens=False).ids) + 1 if text.title else 0
        capacity = max(self._size // 2, self._size - title, 1)  # a long title leaves at least half for the text
        chunks: list[str] = self._splitter(capacity, text.markdown).chunks(text.text)
        return [chunk for chunk in chunks if chunk.strip()]

    def _make_splitter(self, capacity: int, markdown: bool) -> Any:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter

        kind = MarkdownSplitter if markdown else TextSplitter
        return kind.from_huggingface_tokenizer(self._tokens, capacity, min(self._overlap, capacity // 2))


def word_tokens() -> Any:
    """Return a tokenizer without a model: each word, punctuation mark and Chinese character is a token."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokens = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))  # noqa: S106 (not a password)
    tokens.normalizer = normalizers.BertNormalizer(clean_text=False, strip_accents=False, lowercase=False)
    tokens.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokens


def model_tokens(name: str) -> Any:
    """Return the tokenizer of a model (hub id, folder, demo). Raises ConfigError."""
    from transformers import AutoTokenizer

    source = resolve(name, key="retrieval.tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=False)  # None would ask on stdin
        return plain(tokenizer.backend_tokenizer)
    except (OSError, ValueError, AttributeError) as error:
        if brings_code(source):
            raise ConfigError(f'retrieval.tokenizer: "{name}": {needs_code(None)}') from None
        raise ConfigError(
            f'retrieval.tokenizer: "{name}": has no fast tokenizer that loads ({flat(error, 160)})'
        ) from None


def plain(tokens: Any) -> Any:
    """Return a copy of a tokenizer without truncation and padding."""
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokens.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


# -- documents -------------------------------------------------------------------------------------

JSONL = (".jsonl", ".ndjson")
RECORDS = ("json", "csv", "tsv")  # other kinds of files with a document per record
LOOKED_AT = 100  # records of JSON, one of which has to be a document
WHY = 200  # characters of a reason that names columns: a file without a header has texts for names
AS_TEXT = "to read the file as text, name it .txt"


@dataclass(frozen=True, slots=True)
class Document:
    """One document. `id` is stable across builds; `digest` changes with the content; `read` raises Unreadable."""

    id: str
    where: str  # file or file:line, for messages
    digest: str
    read: Callable[[], Text]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A document left out, with the reason."""

    where: str
    why: str
    id: str | None = None  # of an unreadable document, whose passages stay in the index
    many: bool = False  # whether unknown documents may be missing with it


@dataclass(frozen=True, slots=True)
class NonDocument:
    """A file in a folder that is not a document, such as a photo. ending: of its name."""

    ending: str


def documents(paths: Sequence[str], file_types: Sequence[str] = ()) -> Iterator[Document | Skipped | NonDocument]:
    """Yield the documents of `paths`: files, and folders with all their files except hidden ones.

    file_types: endings to include from folders (".md"); all by default. Raises ConfigError for a missing path.
    """
    roots = [Path(path).expanduser() for path in paths]
    for root in roots:
        if not root.exists():
            raise ConfigError(f"--corpus: {root}: no such file or folder")
    wanted = tuple(f".{ending.lstrip('.').lower()}" for ending in file_types)
    for root in roots:
        if not root.is_dir():
            yield from _file_documents(root, root.name)
            continue
        for item in _files(root):
            if isinstance(item, Skipped):
                yield item
            elif not wanted or item.name.lower().endswith(wanted) or _unpacked(item.name).endswith(wanted):
                yield from _file_documents(item, item.relative_to(root).as_posix(), asked_for=bool(wanted))


def _files(root: Path) -> Iterator[Path | Skipped]:
    """Yield a folder's files sorted by path, and a Skipped for links and unreadable folders."""
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
    """Return a file's name in lower case without a compression ending."""
    small = name.lower()
    return small.removesuffix(next((ending for ending in PACKED if small.endswith(ending)), ""))


def _file_documents(file: Path, name: str, *, asked_for: bool = True) -> Iterator[Document | Skipped | NonDocument]:
    """Yield the documents of a file. asked_for: named, or of a requested type, rather than found in a folder."""
    try:
        name.encode()
    except UnicodeEncodeError:
        yield Skipped(ascii(str(file)), "its name is not UTF-8; rename it")
        return
    if _unpacked(name).endswith(JSONL):
        yield from _jsonl_documents(file, name)
        return
    try:
        if file.exists() and not file.is_file():
            yield Skipped(str(file), "not a regular file")
            return
        if kind_of(name) in RECORDS:
            yield from _record_documents(file, name, asked_for=asked_for)
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


def _jsonl_documents(file: Path, name: str) -> Iterator[Document | Skipped]:
    try:
        with open_source(InputConfig(path=[str(file)], format="jsonl")) as lines:
            yield from _documents_in(lines, file, name)
    except ConfigError as error:
        yield _damaged(file, error)


class _Texts(Columns):
    """The columns of a table of documents: a text that looks like JSON stays as it is."""

    def with_json(self, row: dict[str, Any], *, typed: bool) -> dict[str, Any]:
        return row


def _record_documents(file: Path, name: str, *, asked_for: bool) -> Iterator[Document | Skipped | NonDocument]:
    """Yield the documents of a JSON, CSV or TSV file; one Skipped if its first records are none.

    JSON that is no list of records, such as a program's settings, is no document of a folder in which it was found.
    """
    try:
        stream = Stream(str(file)).look()
        if stream.kind == "zip":
            stream.__exit__()
            yield Skipped(str(file), "a zip archive; unpack it")
            return
        with TextSource(str(file), _Texts({}), name=kind_of(name), stream=stream) as rows:
            if rows.names and "text" not in rows.names:
                why = f'its first line has to name a column "text" (and "id", "title"), it has {listed(rows.names)}'
                yield Skipped(str(file), f"{why[:WHY]}; {AS_TEXT}")
                return
            items = _documents_in(rows, file, name)
            first = list(islice(items, LOOKED_AT))
            reasons = [item for item in first if isinstance(item, Skipped)]
            if not first:
                yield Skipped(str(file), "empty: contains no documents")
            elif len(reasons) < len(first) or rows.names or reasons[-1].many:
                yield from first
                yield from items
            elif len(first) == 1 and not asked_for:
                yield NonDocument(file.suffix)
            else:  # one line, not one per record
                yield Skipped(str(file), f"its first records are no documents: {reasons[0].why}; {AS_TEXT}")
    except ConfigError as error:
        yield _damaged(file, error)


def _documents_in(rows: Source, file: Path, name: str) -> Iterator[Document | Skipped]:
    """Yield the document of each row; documents before a damage are kept."""
    try:
        for row in rows:
            where = rows.where(row.number)
            try:
                yield _row_document(row, where, name)
            except RecordError as error:
                yield Skipped(where, str(error))
    except ConfigError as error:
        yield _damaged(file, error)


def _damaged(file: Path, error: ConfigError) -> Skipped:
    return Skipped(str(file), str(error).removeprefix(f"{file}:").strip(), many=True)


def _row_document(row: InputRow, where: str, name: str) -> Document:
    value: Any = row.value
    if isinstance(value, RecordError):
        raise value
    if isinstance(value, dict) and value.get("text", "") is None:  # an empty cell
        raise RecordError("empty: contains no text")
    if isinstance(value, dict) and not isinstance(value.get("text", ""), str):
        raise RecordError(f'"text" must be a string, got {kind(value["text"])}')
    if not isinstance(value, dict) or "text" not in value:
        has = f"; it has {names(value)}" if isinstance(value, dict) else ""
        raise RecordError(f'a document is an object {{"id", "title", "text"}} with a text{has}')
    key, title, text = value.get("id", value.get("_id")), value.get("title"), value["text"]  # _id: BEIR
    if title is not None and not isinstance(title, str):
        raise RecordError(f'"title" must be a string, got {kind(title)}')
    doc = id_text(key) or f"{name}:{row.number}"
    return Document(doc, where, _digest(doc, title or "", text.encode()), lambda: Text(text, title or None))


def _digest(doc: str, form: str, content: bytes) -> str:
    """Return a digest that changes with a document's content and with the form of its passage ids."""
    # older versions did not always number these: their passages are written again
    numbered = "#\0" if looks_numbered(doc) else ""
    return blake2b(f"{doc}\0{form}\0{numbered}".encode() + content, digest_size=12).hexdigest()
