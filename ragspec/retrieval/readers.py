"""Bytes of a file -> its text: plain text, Markdown, HTML, PDF, Word. A new format is a function and a line below.

>>> reader_of(".md")(b"# The pump").title
'The pump'
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ragspec.inputs.content import decoded, encoding_of

NOT_CONTENT = ("script", "style", "noscript", "template", "nav")


class Unreadable(Exception):
    """A document that gives us no text; the message says why."""


@dataclass(frozen=True, slots=True)
class Text:
    """What a document says. markdown: headings and lists may guide where it is cut."""

    text: str
    title: str | None = None
    markdown: bool = False


def is_binary(content: bytes) -> bool:
    """Return whether a file is no text in any encoding that is read."""
    return encoding_of(content[:4]) is None and b"\0" in content[:8192]


def read_text(content: bytes) -> Text:
    """Return text in UTF-8 or UTF-16 as it is."""
    if is_binary(content):
        raise Unreadable("a binary file, not text")
    try:
        return Text(decoded(content))
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 text (byte {error.start + 1}); if it is text, save it as UTF-8") from None


def read_markdown(content: bytes) -> Text:
    """Return Markdown with its first top heading as the title."""
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
    """Return a Word document as Markdown: headings, lists and tables in reading order; no pictures, no comments."""
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
    """Return the text of all pages. Scans have none."""
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
    # PDFium marks a hyphen that only breaks a word at the line's end
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
    """Return what reads a file, None where neither its content nor its name says."""
    if content.startswith(b"%PDF-"):
        return read_pdf
    if content.startswith(b"PK\x03\x04") and b"word/document.xml" in content:
        return read_docx
    return READERS.get(suffix)
