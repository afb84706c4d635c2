"""The summary in words: what a reader would say after looking at all the charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ragspec.benchmark.plan import baselines, ratios_to_peers, ratios_to_plain
from ragspec.benchmark.results import SPEED, Piece, Quote, Ratio, Results, Run, Sample
from ragspec.outputs.folder import write_private
from ragspec.report import charts
from ragspec.report.charts import figures, rows

WORTH = 1.02  # smaller gains do not count


def summary(results: Results) -> list[str]:
    """Return sentences: who won by how much and how surely, whether answers changed, what the work was."""
    runs = {name: results.typical(name) for name in results.names}
    sentences = [*_verdicts(results), *_sameness(runs)]
    first = next(iter(runs.values()))
    lengths = sorted({run.output_tokens for run in runs.values()})
    tokens = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    mean = first.output_tokens / max(1, first.records)
    sentences.append(
        f"{first.records} records with {first.prompt_tokens:,} prompt tokens and {tokens} output tokens "
        f"({mean:.0f} an answer): the shorter the answers, the less speculation can do."
    )
    if share := _prompt_share(first):
        sentences.append(f"{first.name} spends {share:.0%} of its time on prompts, which drafts do not speed up.")
    for ratio in ratios_to_peers(results):
        sentences.append(f"{_sentence(replace(ratio, baseline=ratio.baseline.removeprefix('peer-')))}.")
    return sentences


def _sameness(runs: Mapping[str, Run]) -> list[str]:
    """Return whose answers are those of plain decoding; nothing about runs without plain decoding to compare."""
    plain = baselines(list(runs.values()))
    own = [name for name, run in runs.items() if not run.peer and plain[name] != name]
    held = [name for name in own if plain[name] is not None]
    if not held:
        return []
    changed = {name: runs[name].records - (runs[name].identical or 0) for name in held}
    if any(changed.values()):
        parts = ", ".join(f"{name} ({count})" for name, count in changed.items() if count)
        return [f"Answers differ from plain decoding in {parts}; `ragspec verify` says whether that is rounding."]
    whose = "" if held == own else f" of {', '.join(held)}"
    return [f"Every answer{whose} is, token for token, that of plain decoding."]


def _verdicts(results: Results) -> list[str]:
    """Return what the passes tell of speculation beside plain decoding: the best and every loss first, what is open."""
    own = sorted(ratios_to_plain(results, SPEED), key=lambda ratio: -ratio.median)
    if not own:
        if len(results.names) == 1:
            return ["One method was timed, so there is nothing to compare it with."]
        return [
            "No speculation was timed next to plain decoding with the same runner and batch size, so there is nothing "
            "to compare; the notes name the run that is missing."
        ]
    faster = [ratio for ratio in own if ratio.is_faster]
    slower = [ratio for ratio in own if ratio.is_slower]
    unclear = [ratio for ratio in own if not ratio.is_faster and not ratio.is_slower]
    lead, rest = _lead(faster, unclear, slower), [ratio for ratio in slower if faster or unclear]
    if rest:
        lead += f" Slower than plain decoding: {_listed(rest)}."
    if not unclear[not faster :]:
        return [lead]
    return [lead, f"May be chance: {_listed(unclear[not faster :])}; more passes (--repeat) would tell."]


def _lead(faster: Sequence[Ratio], unclear: Sequence[Ratio], slower: Sequence[Ratio]) -> str:
    """Return the sentence about the best: of those that are surely faster, else of those that may be."""
    if faster:
        best = faster[0]
        little = "" if best.median >= WORTH else ", which is little"
        return f"{_sentence(best)}, end to end{little}."
    if unclear:
        return f"No clear winner: {_sentence(unclear[0])}; more passes (--repeat) would tell."
    return f"Speculation does not pay here: the best, {_sentence(slower[0])}."


def _sentence(ratio: Ratio) -> str:
    """Return what a ratio tells, and no more than its interval allows."""
    if ratio.is_faster or ratio.is_slower:
        return f"{ratio.name} is {_times(ratio)} as fast as {ratio.baseline}"
    return f"{ratio.name} came to {_times(ratio)} the speed of {ratio.baseline}, which may be chance"


def _listed(ratios: Sequence[Ratio]) -> str:
    return ", ".join(f"{ratio.name} at {_times(ratio)}" for ratio in ratios)


def _times(ratio: Ratio) -> str:
    if ratio.interval is None:
        return f"{ratio.median:.2f} times (one pass)"
    return f"{ratio.median:.2f} times ({ratio.interval[0]:.2f} to {ratio.interval[1]:.2f})"


def _prompt_share(run: Run) -> float | None:
    """Return the share of a run's time that its prompts took, None if the runner does not know it."""
    return run.prefill_s / (run.prefill_s + run.decode_s) if run.prefill_s and run.decode_s else None


# -- answers token by token: which tokens a draft had guessed, and which passage they were copied from


COLOURS = 8  # of passages; their classes are in the page's style


@dataclass(frozen=True, slots=True)
class Token:
    """A token as the page shows it. kind: its class. source: what the pointer over it shows."""

    text: str
    kind: str
    drafted: bool
    source: str


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """An answer of candidate `name`."""

    name: str
    title: str
    tokens: tuple[Token, ...]
    passages: tuple[Quote, ...]
    speculation: dict[str, Any]


def shown_answers(results: Results) -> list[ShownAnswer]:
    """Return the answers of the last candidate that knows where its tokens came from; none if no candidate does."""
    for name in reversed(results.names):
        detail = results.details.get(name)
        if detail and any(sample.guessed_known for sample in detail.samples):
            return [_shown(name, sample) for sample in detail.samples]
    return []


def _shown(name: str, sample: Sample) -> ShownAnswer:
    colours = {passage.id: f"c{place % COLOURS}" for place, passage in enumerate(sample.passages)}
    tokens = tuple(
        Token(
            piece.text,
            colours.get(piece.context, piece.by) if piece.context is not None else piece.by,
            piece.by == "draft",
            _source(piece),
        )
        for piece in sample.pieces
    )
    return ShownAnswer(name, sample.question or sample.id, tokens, sample.passages, sample.speculation)


def _source(piece: Piece) -> str:
    how = "guessed by a draft, accepted" if piece.by == "draft" else "written by the model"
    return how if piece.context is None else f"{how}; found in passage {piece.context}"


# -- results.json -> report.html: the summary in words, charts, tables, answers token by token -----
#
# The page is one file without scripts or links; it forbids both to itself (Content-Security-Policy), and everything
# that a model or a user wrote is escaped.


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
        times=Ratio.formatted,
        scores=list(dict.fromkeys(name for quality in results.quality.values() for name in quality.scores)),
        answers=shown_answers(results) if quote else [],
    )
