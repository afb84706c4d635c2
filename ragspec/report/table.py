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
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError, did_you_mean
from ragspec.host.files import write_whole

FORMATS = ("md", "csv", "latex", "json")
LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}"}
LATEX |= {"^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "<": r"\textless{}", ">": r"\textgreater{}"}
LATEX |= {"|": r"\textbar{}", "[": "{[}", "]": "{]}"}  # \\[ would be a length
MARKDOWN = {"|": r"\|", "<": "&lt;", "*": r"\*", "`": r"\`", "~": r"\~", "\\": r"\\"}
EMPHASIS = re.compile(r"(?<!\w)_|_(?!\w)")  # within a word, an underscore is one
DIGITS = 1000  # numbers above have no decimals
TABLES = (".jsonl", ".csv")  # files of rows
Row = Mapping[str, Any]


def check_format(kind: str | None) -> None:
    """Raise ConfigError for a `--format` that is not known."""
    if kind is not None and kind not in FORMATS:
        raise ConfigError(f'--format: "{kind}" is not known{did_you_mean(kind, FORMATS)}; give {", ".join(FORMATS)}')


def written(rows: Sequence[Row], kind: str) -> str:
    """Return rows as text, with a line end. rows: with the same keys; None is an empty cell. kind: one of FORMATS."""
    rows = [{title: _known(value) for title, value in row.items()} for row in rows]
    if kind == "json":
        return json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    titles = list(rows[0]) if rows else []
    if kind == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, titles, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()
    cells = [[_shown(row[title]) for title in titles] for row in rows]
    if kind == "md":
        return _markdown(titles, cells)
    return _latex(titles, cells, "".join("l" if _holds_text(rows, title) else "r" for title in titles))


def _known(value: Any) -> Any:
    """Return a value; None for a number that is none, such as the mean of nothing."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _holds_text(rows: Sequence[Row], title: str) -> bool:
    return any(isinstance(row[title], str) for row in rows)


def check_table(path: str, flag: str) -> None:
    """Raise ConfigError for a file of rows that cannot be written."""
    if Path(path).suffix.lower() not in TABLES:
        raise ConfigError(f"{flag}: {path} must end in {' or '.join(TABLES)}")
    if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{flag}: {path} cannot be written; choose another file")


def write_table(path: str, rows: Sequence[Row]) -> None:
    """Write rows to a .csv or .jsonl file, whole or not at all."""
    is_csv = Path(path).suffix.lower() == ".csv"
    text = written(rows, "csv") if is_csv else "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_whole(Path(path), text.encode())


def _shown(value: Any) -> str:
    """Return a cell for readers: numbers with few digits."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < DIGITS else f"{value:.0f}"
    return "" if value is None else str(value)


def _markdown(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = ([EMPHASIS.sub(r"\\_", _escaped(cell, MARKDOWN, "<br>")) for cell in line] for line in [titles, *cells])
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(titles), *rest, ""])


def _latex(titles: Sequence[str], cells: Sequence[Sequence[str]], columns: str) -> str:
    lines = [" & ".join(_escaped(cell, LATEX, " ") for cell in line) + r" \\" for line in [titles, *cells]]
    body = "\n".join([r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
    return f"\\begin{{tabular}}{{{columns}}}\n{body}\n\\end{{tabular}}\n"


def _escaped(text: str, special: Mapping[str, str], between: str) -> str:
    """Return a cell on one line. special: what stands for a character. between: what stands for a line end."""
    lines = ("".join(special.get(letter, letter) for letter in line) for line in text.splitlines())
    return between.join(lines)
