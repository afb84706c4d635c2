"""Bytes of a file -> its text: plain text, Markdown, HTML, PDF. A new format is a function and a line in `READERS`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

NOT_CONTENT = ("script", "style", "noscript", "template", "nav")


class Unreadable(Exception):
    """A document that gives us no text; the message says why."""


@dataclass(frozen=True, slots=True)
class Text:
    """What a document says. markdown: headings and lists may guide where it is cut."""

    text: str
    title: str | None = None
    markdown: bool = False


def read_text(content: bytes) -> Text:
    """Return UTF-8 text as it is."""
    if b"\0" in content[:8192]:
        raise Unreadable("a binary file, not text")
    try:
        return Text(content.decode("utf-8-sig"))
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
    from markdownify import MarkdownConverter

    if b"\0" in content[:8192]:
        raise Unreadable("a binary file, not HTML")
    page = BeautifulSoup(content, "html.parser")
    title = page.title.get_text(" ", strip=True) if page.title else None
    for tag in page(NOT_CONTENT):
        tag.decompose()
    text = MarkdownConverter(heading_style="ATX", strip=["a", "img"]).convert_soup(page.body or page)
    return Text(re.sub(r"\n{3,}", "\n\n", text).strip(), title or None, markdown=True)


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
}
