"""Tables of figures for papers, pages and programs: Markdown, CSV, LaTeX or JSON.

>>> print(written([{"method": "context", "tokens/s": 41.2}], "md"))
| method | tokens/s |
|---|---|
| context | 41.2 |
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ragspec.errors import ConfigError, did_you_mean

FORMATS = ("md", "csv", "latex", "json")
LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}"}
LATEX |= {"^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
DIGITS = 1000  # numbers above have no decimals
BAR = r"\|"
Row = Mapping[str, Any]


def check_format(kind: str | None) -> None:
    """Raise ConfigError for a `--format` that is not known."""
    if kind is not None and kind not in FORMATS:
        raise ConfigError(f'--format: "{kind}" is not known{did_you_mean(kind, FORMATS)}; give {", ".join(FORMATS)}')


def written(rows: Sequence[Row], kind: str) -> str:
    """Return rows as text, with a line end. rows: with the same keys; None is an empty cell. kind: one of FORMATS."""
    if kind == "json":
        return json.dumps(list(map(dict, rows)), indent=2, ensure_ascii=False) + "\n"
    titles = list(rows[0]) if rows else []
    if kind == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, titles, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()
    cells = [[_shown(row[title]) for title in titles] for row in rows]
    return _markdown(titles, cells) if kind == "md" else _latex(titles, cells)


def _shown(value: Any) -> str:
    """Return a cell for readers: numbers with few digits."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < DIGITS else f"{value:.0f}"
    return "" if value is None else str(value)


def _markdown(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(cell.replace('|', BAR) for cell in line)} |" for line in [titles, *cells])
    return "\n".join([head, "|" + "---|" * len(titles), *rest, ""])


def _latex(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [" & ".join(map(_escaped, line)) + r" \\" for line in [titles, *cells]]
    columns = "l" + "r" * (len(titles) - 1)
    body = "\n".join([r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
    return f"\\begin{{tabular}}{{{columns}}}\n{body}\n\\end{{tabular}}\n"


def _escaped(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)
