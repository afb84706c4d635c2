"""results.json -> report.html: the summary in words, charts, tables, answers token by token.

The page is one file without scripts or links; it forbids both to itself (Content-Security-Policy), and everything that
a model or a user wrote is escaped.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup

from ragspec.benchmark.results import Ratio, Results
from ragspec.outputs.private import write_private
from ragspec.report import charts
from ragspec.report.answers import shown_answers
from ragspec.report.figures import figures
from ragspec.report.rows import rows
from ragspec.report.words import summary

NAME = "report.html"


def write_report(results: Results, folder: Path, *, quote: bool = True) -> Path:
    """Write `folder`/report.html and return its path.

    quote: show answers, with their questions and passages.
    """
    path = folder / NAME
    write_private(path, render(results, quote=quote).encode())
    return path


def render(results: Results, *, quote: bool = True) -> str:
    """Return the page."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((files(__package__) / "page.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        results=results,
        summary=summary(results),
        figures=[
            (figure.title, figure.text, Markup(charts.draw(figure.spec)))  # noqa: S704
            for figure in figures(results)
        ],
        rows=rows(results),
        times=Ratio.told,
        scores=list(dict.fromkeys(name for quality in results.quality.values() for name in quality.scores)),
        answers=shown_answers(results) if quote else [],
    )
