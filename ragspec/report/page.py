"""results.json -> report.html: the summary in words, charts, tables, answers token by token.

The page is one file without scripts or links; it forbids both to itself (Content-Security-Policy), and everything that
a model or a user wrote is escaped.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from markupsafe import Markup

from ragspec.benchmark.baseline import baselines, ratios_to_peers, ratios_to_plain
from ragspec.outputs.private import write_private
from ragspec.report import charts
from ragspec.report.words import summary

COLOURS = 8  # of passages in the token view
NAME = "report.html"
POSITIONS = 16  # of a draft that the chart shows


def write_report(results: dict[str, Any], folder: Path, *, quote: bool = True) -> Path:
    """Write `folder`/report.html from the contents of results.json and return its path.

    quote: show answers, with their questions and passages.
    """
    path = folder / NAME
    write_private(path, render(results, quote=quote).encode())
    return path


def render(results: dict[str, Any], *, quote: bool = True) -> str:
    """Return the page."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((files(__package__) / "page.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        results=results,
        summary=summary(results),
        figures=[(title, text, Markup(charts.draw(spec))) for title, text, spec in figures(results)],  # noqa: S704
        rows=rows(results),
        answers=answers(results) if quote else [],
    )


def names_of(results: dict[str, Any]) -> list[str]:
    """Return the candidates in their order."""
    return list(dict.fromkeys(run["name"] for run in results["runs"]))


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per candidate: medians over passes; ratio and identical are None where no plain run compares."""
    table = []
    plain = baselines(results["runs"])
    to_plain = [ratio for ratio in ratios_to_plain(results) if ratio["metric"] == "tokens_per_s"]
    for name in names_of(results):
        runs = [run for run in results["runs"] if run["name"] == name]
        row = dict(runs[0])
        for metric in ("tokens_per_s", "decode_tokens_per_s", "generate_s"):
            values = [run[metric] for run in runs if run[metric]]
            row[metric] = median(values) if values else None
        row["ratio"] = next((ratio for ratio in to_plain if ratio["name"] == name), None)
        if plain[name] is None:
            row["identical"] = None
        row["passes"] = len(runs)
        table.append(row)
    return table


def figures(results: dict[str, Any]) -> list[tuple[str, str, charts.Spec]]:
    """Return (title, what it shows, specification) of every chart that the results have something for."""
    found: list[tuple[str, str, charts.Spec]] = []
    for metric, title in (("tokens_per_s", "Speed-up, end to end"), ("decode_tokens_per_s", "Speed-up of decoding")):
        ratios = [
            {**ratio, "name": f"{ratio['name']} / {ratio['baseline']}"}
            for ratio in [*ratios_to_plain(results), *ratios_to_peers(results)]
            if ratio["metric"] == metric
        ]
        if ratios:
            text = "Each point is the median of paired passes, the bar its 95% interval."
            if all(ratio["low"] is None for ratio in ratios):
                text = "One pass each: no interval can be given."
            found.append((title, text, charts.speed_ups(ratios)))
    table = rows(results)
    if len({row["batch_size"] for row in table}) > 1:
        values = [
            {"series": _series(row), "x": row["batch_size"], "y": row["tokens_per_s"]}
            for row in table
            if row["batch_size"]
        ]
        spec = charts.lines(values, "records at once", "tokens per second", ordinal=True)
        found.append(("Speed against batch size", "Output tokens over the whole time, prompts included.", spec))
    values = [
        {"series": row["name"], "x": position, "y": rate}
        for row in table
        for position, rate in enumerate(row["acceptance_by_position"][:POSITIONS], 1)
    ]
    if values:
        text = "Of the drafts at least so long, the share whose token at this place, and all before it, were right."
        spec = charts.lines(values, "place in the draft", "accepted")
        found.append(("Acceptance by position", text, spec))
    details = {name: detail for name, detail in results["details"].items() if detail}
    values = [
        {"series": name, "value": rate} for name, detail in details.items() for rate in detail["acceptance_by_record"]
    ]
    if values:
        text = "How differently speculation works from record to record."
        found.append(("Acceptance by record", text, charts.histogram(values, "accepted share of a record's drafts")))
    if (curve := cost_curve(details)) is not None:
        text = (
            "What verifying more tokens at once costs here (measured at start-up, short context), and what reading the "
            "weights and multiplying with them would cost at this machine's own best speeds."
        )
        found.append(("Cost of a step", text, curve))
    return found


def cost_curve(details: dict[str, Any]) -> charts.Spec | None:
    """Return the chart of the candidate that measured the largest steps, with the roofline."""
    measured = [detail for detail in details.values() if detail["step_cost"]]
    if not measured:
        return None
    detail = max(measured, key=lambda detail: len(detail["step_cost"]["points"]))
    cost, roof = detail["step_cost"], detail["roofline"]
    values = [{"series": "measured", "x": tokens, "y": 1e3 * seconds} for tokens, seconds in cost["points"]]
    if roof and cost["parameters"]:
        reading = cost["weight_bytes"] / roof["bytes_per_s"]
        for tokens, _ in cost["points"]:
            counting = 2 * cost["parameters"] * tokens / roof["flops_per_s"]
            values.append({"series": "memory", "x": tokens, "y": 1e3 * reading})
            values.append({"series": "arithmetic", "x": tokens, "y": 1e3 * counting})
    return charts.lines(values, "tokens in a step", "milliseconds", log=True)


def _series(row: dict[str, Any]) -> str:
    words = ["peer" if row["peer"] else "", row["runner"], row["method"]]
    if row["num_tokens"] != "auto":
        words.append(str(row["num_tokens"]))
    return " ".join(word for word in words if word)


def answers(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answers of the last candidate that knows where its tokens came from, as the page shows them."""
    for name in reversed(names_of(results)):
        detail = results["details"].get(name)
        if not detail or not any(sample["guessed_known"] for sample in detail["samples"]):
            continue
        shown = []
        for sample in detail["samples"]:
            numbers = {passage["id"]: i for i, passage in enumerate(sample["passages"])}
            pieces = [
                {
                    "text": piece["text"],
                    "kind": f"c{numbers[piece['context']] % COLOURS}" if piece["context"] in numbers else piece["by"],
                    "drafted": piece["by"] == "draft",
                    "source": _source(piece),
                }
                for piece in sample["pieces"]
            ]
            shown.append({**sample, "name": name, "pieces": pieces})
        return shown
    return []


def _source(piece: dict[str, Any]) -> str:
    how = "guessed by a draft, accepted" if piece["by"] == "draft" else "written by the model"
    return f"{how}; stands in passage {piece['context']}" if piece["context"] is not None else how
