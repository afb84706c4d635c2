"""The report's charts as Vega-Lite specifications, and its table rows. vl-convert draws SVG: no scripts, no network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from ragspec.benchmark.plan import baselines, ratios_to_peers, ratios_to_plain
from ragspec.benchmark.results import DECODE_SPEED, SPEED, Ratio, Results, Run
from ragspec.errors import ConfigError

TICKS = [0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20]
COARSE = [0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20]  # on an axis over more than WIDE
WIDE = 3
MARGIN = 1.06  # beyond the outermost interval
SMALL, IN_A_ROW = (200, 110), 2  # pixels of a small multiple, and how many stand side by side
WIDTH, HEIGHT = 430, 240  # pixels of the plot, without axes and legend
PALETTE = ["#4c5b6b", "#0b7285", "#c2410c", "#6d28d9", "#15803d", "#b91c1c", "#a16207", "#1d4ed8"]
STYLE = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#e5e7eb", "domainColor": "#9ca3af", "tickColor": "#9ca3af", "labelFontSize": 11},
    "range": {"category": PALETTE},
    "legend": {"orient": "bottom", "title": None, "columns": 3, "symbolType": "square", "columnPadding": 22},
}
Spec = dict[str, Any]


def draw(figure: Figure) -> str:
    """Return a figure as an SVG element with its words. Raises ConfigError without vl-convert-python."""
    try:
        import vl_convert
    except ImportError:
        raise ConfigError('report.html: its charts need vl-convert: pip install "ragspec[report]"') from None

    svg: str = vl_convert.vegalite_to_svg({**figure.spec, "config": STYLE})
    words = escape(f"{figure.title}. {figure.text} {figure.words}".strip())
    return f'<svg role="img" aria-label="{words}"' + svg[svg.index("<svg") + len("<svg") :]


def speed_ups(ratios: list[dict[str, Any]]) -> Spec:
    """Return a chart of ratios with intervals. ratios: {name, median, low, high}; low and high may be None."""
    names = [ratio["name"] for ratio in ratios]
    name: Spec = {
        "field": "name",
        "type": "nominal",
        "sort": names,
        "title": None,
        "axis": {"labelLimit": 320, "minExtent": 190},
    }
    ends = [end for ratio in ratios for end in (ratio["low"], ratio["median"], ratio["high"]) if end is not None]
    lowest, highest = min([*ends, 1.0]) / MARGIN, max([*ends, 1.0]) * MARGIN
    scale = {"type": "log", "domain": [lowest, highest], "nice": False}  # twice and half as fast are as far from 1
    axis = {
        "values": [tick for tick in (TICKS if highest < WIDE * lowest else COARSE) if lowest <= tick <= highest],
        "format": "~g",
    }
    x: Spec = {"type": "quantitative", "scale": scale, "axis": axis, "title": "times as fast (logarithmic)"}
    return {
        "width": WIDTH - 170,
        "height": {"step": 30},
        "data": {"values": ratios},
        "layer": [
            {
                "mark": {"type": "rule", "color": "#9ca3af", "strokeDash": [4, 3]},
                "encoding": {"x": {**x, "datum": 1}},
            },
            {
                "transform": [{"filter": "isValid(datum.low)"}],
                "mark": {"type": "rule", "strokeWidth": 3, "color": "#99c8d1"},
                "encoding": {
                    "y": name,
                    "x": {**x, "field": "low"},
                    "x2": {"field": "high"},
                },
            },
            {
                "mark": {"type": "point", "filled": True, "size": 90, "color": PALETTE[1], "opacity": 1},
                "encoding": {
                    "y": name,
                    "x": {**x, "field": "median"},
                },
            },
        ],
    }


def lines(values: list[dict[str, Any]], x: str, y: str, *, log: bool = False, ordinal: bool = False) -> Spec:
    """Return a chart with one line per series. values: {series, x, y}. x, y: axis titles."""
    scale: Spec = {"scale": {"type": "log", "nice": False}} if log else {}
    kind = "ordinal" if ordinal else "quantitative"
    axis: Spec = {"axis": {"labelAngle": 0}} if ordinal else {"axis": {"format": "~s", "grid": log}}
    if not log and not ordinal:
        axis = {"axis": {"values": sorted({value["x"] for value in values})}}
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "data": {"values": values},
        "mark": {"type": "line", "point": True, "strokeWidth": 2},
        "encoding": {
            "x": {"field": "x", "type": kind, "title": x, **scale, **axis},
            "y": {"field": "y", "type": "quantitative", "title": y, **scale},
            "color": {"field": "series", "type": "nominal", "sort": None},
        },
    }


def multiples(spec: Spec, values: list[dict[str, Any]]) -> Spec:
    """Return a chart as small multiples, one per series, if there are several. values: with a `series` each."""
    names = list(dict.fromkeys(value["series"] for value in values))
    if len(names) < 2:
        return spec
    each = {**spec, "width": SMALL[0], "height": SMALL[1]}
    del each["data"]
    each["encoding"] = {**spec["encoding"], "color": {**spec["encoding"]["color"], "legend": None}}
    facet = {"field": "series", "type": "nominal", "sort": names, "title": None}
    return {"data": spec["data"], "facet": facet, "columns": IN_A_ROW, "spec": each}


def histogram(values: list[dict[str, Any]], x: str) -> Spec:
    """Return a chart of how many values are in each tenth. values: {series, value}, value between 0 and 1."""
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "data": {"values": values},
        "mark": {"type": "bar", "opacity": 0.75},
        "encoding": {
            "x": {
                "field": "value",
                "type": "quantitative",
                "bin": {"step": 0.1, "extent": [0, 1]},
                "title": x,
                "axis": {"format": "%", "values": [0, 0.5, 1]},
            },
            "y": {
                "aggregate": "count",
                "type": "quantitative",
                "title": "records",
                "stack": None,
            },
            "color": {"field": "series", "type": "nominal", "sort": None},
        },
    }


# -- table -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TableRow:
    """A candidate. run: its passes combined. ratio: to plain decoding."""

    run: Run
    passes: int
    ratio: Ratio | None


def rows(results: Results) -> list[TableRow]:
    """Return the table; `ratio` and `run.identical` are None without a plain run to compare with."""
    plain = baselines(results.runs)
    to_plain = {ratio.name: ratio for ratio in ratios_to_plain(results, SPEED)}
    table = []
    for name in results.names:
        run = results.typical(name)
        if plain[name] is None:
            run = replace(run, identical=None)
        table.append(TableRow(run, len(results.runs_of(name)), to_plain.get(name)))
    return table


# -- figures ---------------------------------------------------------------------------------------


POSITIONS = 16  # draft positions in the chart
COST_TEXT = (
    "What it costs here to verify more tokens at once (measured at start-up, short context), and what reading the "
    "weights and multiplying by them would cost at this machine's own best speeds."
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its title, a line on what it shows, and its figures in words, for who cannot see it."""

    title: str
    text: str
    spec: Spec
    words: str = ""


def figures(results: Results) -> list[Figure]:
    """Return the charts that the results have data for, in page order."""
    table = rows(results)
    return [
        *_speed_ups(results, SPEED, "Speed-up, end to end"),
        *_speed_ups(results, DECODE_SPEED, "Speed-up of decoding"),
        *_speed_by_batch_size(table),
        *_acceptance_by_position(table),
        *_acceptance_by_record(results),
        *_step_cost(results),
    ]


def _speed_ups(results: Results, metric: str, title: str) -> Iterator[Figure]:
    ratios = [*ratios_to_plain(results, metric), *(ratios_to_peers(results) if metric == SPEED else [])]
    if not ratios:
        return
    text = "Each point is the median of paired passes, the bar its 95% interval."
    if all(ratio.low is None for ratio in ratios):
        text = "One pass each, so there is no interval."
    values = [{**asdict(ratio), "name": f"{ratio.name} / {ratio.baseline}"} for ratio in ratios]
    words = "; ".join(f"{ratio.name} vs. {ratio.baseline}: {ratio.formatted()}" for ratio in ratios)
    yield Figure(title, text, speed_ups(values), words)


def _speed_by_batch_size(table: list[TableRow]) -> Iterator[Figure]:
    runs = [row.run for row in table]
    if len({run.batch_size for run in runs}) < 2:
        return
    values = [
        {"series": _series(run), "x": run.batch_size, "y": run.tokens_per_s}
        for run in runs
        if run.batch_size and run.tokens_per_s is not None
    ]
    spec = lines(values, "records at once", "tokens per second", ordinal=True)
    words = "; ".join(f"{each['series']} at {each['x']}: {each['y']:.1f} tokens per second" for each in values)
    yield Figure("Speed against batch size", "Output tokens over the whole time, prompts included.", spec, words)


def _acceptance_by_position(table: list[TableRow]) -> Iterator[Figure]:
    values = [
        {"series": row.run.name, "x": position, "y": rate}
        for row in table
        for position, rate in enumerate(row.run.acceptance_by_position[:POSITIONS], 1)
    ]
    if values:
        text = "Of the drafts that are at least this long, the share accepted up to and including this position."
        yield Figure(
            "Acceptance by position", text, multiples(lines(values, "position in the draft", "accepted"), values)
        )


def _acceptance_by_record(results: Results) -> Iterator[Figure]:
    values = [
        {"series": name, "value": rate}
        for name, detail in results.details.items()
        if detail
        for rate in detail.acceptance_by_record
    ]
    if values:
        text = "How much speculation's success differs from record to record."
        spec = multiples(histogram(values, "accepted share of drafts"), values)
        yield Figure("Acceptance by record", text, spec)


def _step_cost(results: Results) -> Iterator[Figure]:
    """Yield the step cost of the candidate that measured the largest steps, with the roofline."""
    measured = [
        (detail.step_cost, detail.roofline) for detail in results.details.values() if detail and detail.step_cost
    ]
    if not measured:
        return
    cost, roof = max(measured, key=lambda found: len(found[0].points))
    values = [{"series": "measured", "x": tokens, "y": 1e3 * seconds} for tokens, seconds in cost.points]
    if roof and cost.parameters:
        reading = cost.weight_bytes / roof.bytes_per_s
        for tokens, _ in cost.points:
            counting = 2 * cost.parameters * tokens / roof.flops_per_s
            values.append({"series": "memory", "x": tokens, "y": 1e3 * reading})
            values.append({"series": "arithmetic", "x": tokens, "y": 1e3 * counting})
    yield Figure("Cost of a step", COST_TEXT, lines(values, "tokens in a step", "milliseconds", log=True))


def _series(run: Run) -> str:
    words = ["peer" if run.peer else "", run.runner, run.method]
    if run.num_tokens != "auto":
        words.append(str(run.num_tokens))
    return " ".join(word for word in words if word)
