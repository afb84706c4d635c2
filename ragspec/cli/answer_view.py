"""An answer and its passages as a person reads them: streamed, with what was copied in the colour of its passage.

    view = AnswerView(stdout(), stderr())
    for line in pipeline.answers([record], hear=view.hear): view.finish(line)

The answer goes to stdout, everything about it to stderr. Without a terminal, stdout gets the answer's text alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

from ragspec.outputs.answers import PartialAnswer

COLOURS = ("green", "cyan", "magenta", "yellow", "blue")
EXCERPT = 320  # characters of a passage
WIDEST = 100  # columns of an answer
TAB = 4


# what a terminal would obey, as models and documents may write it: C0 but for line ends and tabs, DEL and C1
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    """Return a text without the control characters that a terminal would obey."""
    return text.translate(CONTROLS)


def stdout() -> Console:
    """Return a console on stdout; a file gets plain text."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(soft_wrap=not terminal, highlight=False, emoji=False, width=None if terminal else WIDEST)


class AnswerView:
    """Shows one answer at a time. out: for the answer. about: for its passages and figures."""

    def __init__(self, out: Console, about: Console) -> None:
        self._out = out
        self._about = about
        self._colours: dict[str, str] = {}
        self._shown = 0  # characters of the answer on the screen
        self._column = 0
        self._wrapped = False  # whether the line began in the middle of one of the answer's

    def begin(self) -> None:
        """Forget the answer before."""
        self._colours, self._shown, self._column, self._wrapped = {}, 0, 0, False

    def hear(self, partial: PartialAnswer) -> None:
        """Show what is new of an answer, up to the last whole word."""
        self._show(partial.text[: max(_word_end(partial.text), self._shown)], partial.copied)

    def show(self, line: Mapping[str, Any]) -> None:
        """Show a whole answer under its question."""
        self.begin()
        self._out.print(Text(visible(str(line.get("query") or line["id"])), style="bold"))
        self.finish(line)

    def finish(self, line: Mapping[str, Any]) -> None:
        """Show the rest of an answer, its passages, and what it took."""
        self._show(line["output"], line.get("copied") or ())
        self._out.print()
        self.show_passages(line)
        self._about.print(Text(_figures(line), style="dim"))

    def show_passages(self, line: Mapping[str, Any]) -> None:
        """Show an answer's passages, and in them what it copied."""
        copied = line.get("copied") or ()
        for span in copied:
            self._colour(span["context"])
        quotes = [{**span, "text": line["output"][span["start"] : span["end"]]} for span in copied]
        self._passages(line.get("passages") or (), quotes)

    def _show(self, text: str, copied: Sequence[Mapping[str, Any]]) -> None:
        styles = [""] * len(text)
        for span in copied:
            style = self._colour(span["context"])
            styles[span["start"] : span["end"]] = [style] * (
                min(span["end"], len(text)) - min(span["start"], len(text))
            )
        at = self._shown
        while at < len(text):
            end = at + 1
            while end < len(text) and styles[end] == styles[at]:
                end += 1
            self._print(text[at:end], styles[at])
            at = end
        self._shown = max(self._shown, len(text))

    def _print(self, text: str, style: str) -> None:
        """Print a piece in one style, broken between words on a terminal."""
        if not self._out.is_terminal:
            self._out.file.write(text)
            self._out.file.flush()
            return
        width = min(self._out.width, WIDEST)
        for word in _words(visible(text).expandtabs(TAB), width):
            if word == "\n" or self._column + cell_len(word.rstrip()) > width:
                self._out.print()
                self._column, self._wrapped = 0, word != "\n"
            if word == "\n" or (self._wrapped and not self._column and not word.strip()):
                continue
            fits = self._column + cell_len(word) <= width
            self._out.print(Text(word if fits else word.rstrip(), style=style), end="")
            self._column += cell_len(word)

    def _colour(self, context: str) -> str:
        return self._colours.setdefault(context, COLOURS[len(self._colours) % len(COLOURS)])

    def _passages(self, passages: Sequence[Mapping[str, Any]], copied: Sequence[Mapping[str, Any]]) -> None:
        quoted = {span["context"] for span in copied}
        for number, passage in enumerate(passages, 1):
            name = str(passage["id"])
            style = self._colour(name) if name in quoted else ""
            print_passage(
                self._about, number, passage, style, [span["text"] for span in copied if span["context"] == name]
            )
        self._about.print()


def print_passage(
    console: Console,
    number: int,
    passage: Mapping[str, Any],
    style: str = "",
    quotes: Sequence[str] = (),
    *,
    words: str = "",
) -> None:
    """Print a passage's number, name and text. style: of its name and of `quotes` in it. words: shown in bold."""
    score = f"{passage['score']:.2f}" if words and "score" in passage else ""
    about = [visible(str(passage.get("title") or "")), score]
    head = Text.assemble(
        (visible(f"[{number}] {passage['id']}"), style or "bold"), ("  ".join(["", *filter(None, about)]), "dim")
    )
    text = excerpt(str(passage["text"]), [style] if style else [], quotes)
    if words:
        asked = "|".join(re.findall(r"[^\W_]{3,}", words)) or "(?!)"
        text.highlight_regex(rf"(?i)\b({asked})", "bold")
    console.print()
    console.print(head)
    console.print(text, width=min(console.width, WIDEST) if console.is_terminal else None)


def excerpt(text: str, styles: Sequence[str], quotes: Sequence[str]) -> Text:
    """Return the part of a passage that shows its first quote, or its beginning. styles: of the quotes, if any."""
    flat = visible(" ".join(text.split()))
    quotes = [visible(" ".join(quote.split())) for quote in quotes]
    places = [flat.find(quote) for quote in quotes]
    first = min((place for place in places if place >= 0), default=0)
    begin = 0 if first < EXCERPT // 2 else flat.rfind(" ", 0, first - EXCERPT // 4) + 1
    end = len(flat) if len(flat) - begin <= EXCERPT else flat.rfind(" ", 0, begin + EXCERPT)
    before, after = "... " if begin else "", " ..." if end < len(flat) else ""
    shown = Text.assemble((before, "dim"), flat[begin:end], (after, "dim"))
    for quote in quotes if styles else ():
        shown.highlight_words([quote], styles[0])
    return shown


# East Asian text: a line may break before any character of it but those that close or join what is before them
WIDE = (
    r"[\u2e80-\u303f\u3041-\u30ff\u3130-\u318f\u31a0-\u9fff\ua960-\ua97f\uf900-\ufaff\uff01-\uff60"
    r"\U00020000-\U0003ffff]"
)
CLOSING = (
    r"[\u3001\u3002\u3009\u300b\u300d\u300f\u3011\u3015\u3099-\u309c\u30fc\uff01\uff09\uff0c\uff0e\uff1a\uff1b"
    r"\uff1f\uff3d\uff5d]"
)
WORD = re.compile(rf"\n|{WIDE}{CLOSING}* *|(?:(?!{WIDE})[^ \n])+ *| +")
WHOLE = re.compile(rf"(?s).*(?:[ \n]|(?=(?!{CLOSING}){WIDE}))")  # up to where a growing text may break last


def _words(text: str, width: int) -> list[str]:
    """Return the pieces between which lines may break, with the spaces after them, and line ends on their own.

    width: what is wider is broken anyway.
    """
    return [piece for word in WORD.findall(text) for piece in _fitting(word, width)]


def _fitting(word: str, width: int) -> list[str]:
    if cell_len(word.rstrip()) <= width:
        return [word]
    ink = word.rstrip()
    *pieces, last = chop_cells(ink, width)
    return [*pieces, last + word[len(ink) :]]


def _word_end(text: str) -> int:
    """Return how much of a growing text ends with whole words."""
    whole = WHOLE.match(text)
    return 0 if whole is None else whole.end()


def _figures(line: Mapping[str, Any]) -> str:
    spec = line.get("speculation") or {}
    parts = [f"{line['output_tokens']:,} tokens" + (f" in {line['latency_s']:.1f} s" if "latency_s" in line else "")]
    if line.get("time_to_first_token_s") is not None:
        parts.append(f"the first after {line['time_to_first_token_s']:.1f} s")
    if spec.get("drafted"):
        parts.append(f"{spec['accepted']} of {spec['drafted']} drafted tokens accepted ({spec['method']})")
    if line.get("dropped_contexts"):
        parts.append(f"{len(line['dropped_contexts'])} passages did not fit")
    if line["finish_reason"] == "length":
        parts.append("cut off at --max-new-tokens")
    return "; ".join(parts)
