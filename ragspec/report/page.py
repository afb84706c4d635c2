"""The report page: results -> report.html with a summary in words, charts, tables, and answers token by token.

The page is one file without scripts or links, and its Content-Security-Policy forbids both. Text from models and users
is escaped.
"""

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
from ragspec.host.files import write_whole
from ragspec.report import charts
from ragspec.report.charts import figures, rows

MIN_GAIN = 1.02  # smaller gains are called little


def summary(results: Results) -> list[str]:
    """Return the summary: who won by how much and how surely, whether answers changed, and the workload."""
    runs = {name: results.typical(name) for name in results.names}
    sentences = verdict(results)
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


def verdict(results: Results) -> list[str]:
    """Return who won by how much and how surely, and whether answers changed."""
    return [*_verdicts(results), *_identity_sentences({name: results.typical(name) for name in results.names})]


def _identity_sentences(runs: Mapping[str, Run]) -> list[str]:
    """Return whether answers equal plain decoding's; empty if no run can be compared."""
    plain = baselines(list(runs.values()))
    own = [name for name, run in runs.items() if not run.peer and plain[name] != name]
    compared = [name for name in own if plain[name] is not None]
    if not compared:
        return []
    changed = {name: runs[name].records - (runs[name].identical or 0) for name in compared}
    if any(changed.values()):
        parts = ", ".join(f"{name} ({count})" for name, count in changed.items() if count)
        return [f"Answers differ from plain decoding in {parts}; `ragspec verify` says whether that is rounding."]
    whose = "" if compared == own else f" of {', '.join(compared)}"
    return [f"Every answer{whose} is, token for token, that of plain decoding."]


def _verdicts(results: Results) -> list[str]:
    """Return the sentences on speculation against plain decoding: best result and losses first, then what is open."""
    found = sorted(ratios_to_plain(results, SPEED), key=lambda ratio: -ratio.median)
    idle = [ratio.name for ratio in found if not _speculated(results, ratio.name)]
    own = [ratio for ratio in found if ratio.name not in idle]
    if idle:
        said = f"{' and '.join(idle)} drafted less than a token per record, so any difference in speed is chance."
        return [*(_verdicts_on(own) if own else ()), said]
    if not own:
        if len(results.names) == 1:
            return ["One method was timed, so there is nothing to compare it with."]
        return [
            "No speculation was timed next to plain decoding with the same runner and batch size, so there is nothing "
            "to compare; the notes name the run that is missing."
        ]
    return _verdicts_on(own)


def _speculated(results: Results, name: str) -> bool:
    """Return whether a candidate drafted at least a token per record; a drafter that failed did not."""
    runs = results.runs_of(name)
    return sum(run.drafted for run in runs) >= sum(run.records for run in runs)


def _verdicts_on(own: Sequence[Ratio]) -> list[str]:
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
    """Return the sentence about the best ratio that is surely faster, else about the best that may be."""
    if faster:
        best = faster[0]
        little = "" if best.median >= MIN_GAIN else ", which is little"
        return f"{_sentence(best)}, end to end{little}."
    if unclear:
        return f"No clear winner: {_sentence(unclear[0])}; more passes (--repeat) would tell."
    return f"Speculation does not pay here: the best, {_sentence(slower[0])}."


def _sentence(ratio: Ratio) -> str:
    """Return the sentence for a ratio, claiming no more than its interval allows."""
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
    """Return the share of a run's time spent on prompts, None if unknown."""
    return run.prefill_s / (run.prefill_s + run.decode_s) if run.prefill_s and run.decode_s else None


# -- answers ---------------------------------------------------------------------------------------


COLOURS = 8  # of passages; classes in the page's style sheet


@dataclass(frozen=True, slots=True)
class Token:
    """A token on the page. kind: its CSS class. source: its tooltip."""

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
    """Return the sample answers of the last candidate that knows its tokens' origin; empty if none does."""
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


# -- page ------------------------------------------------------------------------------------------
NAME = "report.html"
COLUMNS = (  # of the table, after the candidate's name; on a phone, each value is labelled with it
    *("tokens/s", "vs plain", "identical", "accepted", "tokens/step", "decode tokens/s", "output tokens"),
    *("prompt tokens computed", "first token p50", "latency p50", "p95", "memory", "passes"),
)
ENERGY = "J/token"  # the last column, where the machine tells


def style() -> Markup:
    """Return the style sheet that the pages share."""
    return Markup((files(__package__) / "page.css").read_text(encoding="utf-8"))  # noqa: S704


def template(name: str) -> jinja2.Template:
    """Return a page's template, which escapes what it is given."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string((files(__package__) / name).read_text(encoding="utf-8"))


def write_report(results: Results, folder: Path, *, quote: bool = True) -> Path:
    """Write `folder`/report.html and return its path. quote: include answers, questions and passages."""
    path = folder / NAME
    write_whole(path, render(results, quote=quote).encode())
    return path


def render(results: Results, *, quote: bool = True) -> str:
    """Return the page as HTML. quote: include answers, questions and passages."""
    return template("page.html.jinja").render(
        results=results,
        summary=summary(results),
        figures=[
            (figure.title, figure.text, Markup(charts.draw(figure)))  # noqa: S704
            for figure in figures(results)
        ],
        rows=rows(results),
        times=Ratio.formatted,
        scores=list(dict.fromkeys(name for quality in results.quality.values() for name in quality.scores)),
        answers=shown_answers(results) if quote else [],
        columns=(*COLUMNS, ENERGY) if results.has_energy else COLUMNS,
        style=style(),
    )
