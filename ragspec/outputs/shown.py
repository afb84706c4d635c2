"""An answer in memory: an output line that notebooks show with its passages, and what was copied in their colours.

>>> Answer({"id": "q1", "output": "Ann Smith built it.", "finish_reason": "stop", "output_tokens": 6})
Answer('q1', 'Ann Smith built it.', 6 tokens)
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

BACKGROUNDS = ("#0b728533", "#c2410c33", "#6d28d933", "#15803d33", "#b91c1c33", "#a1620733")  # on light and on dark


class Answer(dict[str, Any]):
    """An output line (docs/guide/output.md): `answer["output"]` is the text, or `answer["error"]` says why not."""

    def __repr__(self) -> str:
        if self.get("error"):
            return f"Answer({self['id']!r}, error: {self['error']['message']})"
        cut = ", cut off" if self.get("finish_reason") == "length" else ""
        return f"Answer({self.get('id')!r}, {self.get('output')!r}, {self.get('output_tokens', 0)} tokens{cut})"

    def _repr_html_(self) -> str:
        if self.get("error"):
            return f"<p><b>{escape(str(self['id']))}</b>: {escape(self['error']['message'])}</p>"
        copied = sorted(self.get("copied") or [], key=lambda span: int(span["start"]))
        colours = {name: BACKGROUNDS[at % len(BACKGROUNDS)] for at, name in enumerate(self.get("contexts") or [])}
        head = escape(str(self.get("query") or self.get("id")))
        passages = "".join(_passage(each, colours) for each in self.get("passages") or [])
        under = f"<details><summary>{len(self['passages'])} passages</summary>{passages}</details>" if passages else ""
        return f"<p><b>{head}</b></p><p>{_marked(str(self['output']), copied, colours)}</p>{under}"


def _marked(text: str, copied: list[Mapping[str, Any]], colours: Mapping[str, str]) -> str:
    """Return a text as HTML, with its copied spans in the colours of their passages."""
    parts, at = [], 0
    for span in copied:
        start, end = max(at, span["start"]), span["end"]
        parts.append(escape(text[at:start]))
        colour = colours.get(span["context"], BACKGROUNDS[0])
        parts.append(
            f'<span style="background:{colour}" title="{escape(span["context"])}">{escape(text[start:end])}</span>'
        )
        at = max(at, end)
    return "".join([*parts, escape(text[at:])]).replace("\n", "<br>")


def _passage(passage: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    name = str(passage["id"])
    colour = colours.get(name, BACKGROUNDS[0])
    return f'<p><span style="background:{colour}">{escape(name)}</span> {escape(str(passage["text"]))}</p>'
