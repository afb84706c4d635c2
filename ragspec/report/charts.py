"""Charts as Vega-Lite specifications, drawn to SVG by vl-convert: no script in the page, no network."""

from __future__ import annotations

from typing import Any

from ragspec.errors import ConfigError

WIDTH, HEIGHT = 430, 240  # of the plot, without axes and legend
PALETTE = ["#4c5b6b", "#0b7285", "#c2410c", "#6d28d9", "#15803d", "#b91c1c", "#a16207", "#1d4ed8"]
STYLE = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#e5e7eb", "domainColor": "#9ca3af", "tickColor": "#9ca3af", "labelFontSize": 11},
    "range": {"category": PALETTE},
    "legend": {"orient": "bottom", "title": None, "columns": 3, "symbolType": "square"},
}
Spec = dict[str, Any]


def draw(spec: Spec) -> str:
    """Return `spec` as an SVG element. Raises ConfigError without vl-convert-python."""
    try:
        import vl_convert
    except ImportError:
        raise ConfigError('report.html: its charts need vl-convert: pip install "ragspec[report]"') from None

    svg: str = vl_convert.vegalite_to_svg({**spec, "config": STYLE})
    return svg[svg.index("<svg") :]


def speed_ups(ratios: list[dict[str, Any]]) -> Spec:
    """Return the ratios as points with their intervals. ratios: {name, median, low, high}; low and high may be None."""
    names = [ratio["name"] for ratio in ratios]
    name: Spec = {
        "field": "name",
        "type": "nominal",
        "sort": names,
        "title": None,
        "axis": {"labelLimit": 320, "minExtent": 190},
    }
    scale = {"zero": False, "nice": True}
    return {
        "width": WIDTH - 170,
        "height": {"step": 30},
        "data": {"values": ratios},
        "layer": [
            {
                "mark": {"type": "rule", "color": "#9ca3af", "strokeDash": [4, 3]},
                "encoding": {"x": {"datum": 1, "type": "quantitative"}},
            },
            {
                "transform": [{"filter": "isValid(datum.low)"}],
                "mark": {"type": "rule", "strokeWidth": 3, "color": "#99c8d1"},
                "encoding": {
                    "y": name,
                    "x": {"field": "low", "type": "quantitative", "scale": scale, "title": "times as fast"},
                    "x2": {"field": "high"},
                },
            },
            {
                "mark": {"type": "point", "filled": True, "size": 90, "color": PALETTE[1], "opacity": 1},
                "encoding": {
                    "y": name,
                    "x": {"field": "median", "type": "quantitative", "scale": scale, "title": "times as fast"},
                },
            },
        ],
    }


def lines(values: list[dict[str, Any]], x: str, y: str, *, log: bool = False, ordinal: bool = False) -> Spec:
    """Return one line per series. values: {series, x, y}. x, y: titles of the axes."""
    scale: Spec = {"scale": {"type": "log", "nice": False}} if log else {}
    kind = "ordinal" if ordinal else "quantitative"
    axis: Spec = {"axis": {"labelAngle": 0}} if ordinal else {"axis": {"format": "~s", "grid": log}}
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


def histogram(values: list[dict[str, Any]], x: str) -> Spec:
    """Return how many values fall into each tenth. values: {series, value}, value between 0 and 1."""
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
                "axis": {"format": "%"},
            },
            "y": {"aggregate": "count", "type": "quantitative", "title": "records", "stack": None},
            "color": {"field": "series", "type": "nominal", "sort": None},
        },
    }
