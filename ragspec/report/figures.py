"""Which charts the results have something for, each with a title and a line that says what it shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ragspec.benchmark.baseline import ratios_to_peers, ratios_to_plain
from ragspec.benchmark.results import DECODE_SPEED, SPEED, Results, Run
from ragspec.report.charts import Spec, histogram, lines, speed_ups
from ragspec.report.rows import Row, rows

POSITIONS = 16  # of a draft that the chart shows
COST_TEXT = (
    "What it costs here to verify more tokens at once (measured at start-up, short context), and what reading the "
    "weights and multiplying by them would cost at this machine's own best speeds."
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart of the report."""

    title: str
    text: str
    spec: Spec


def figures(results: Results) -> list[Figure]:
    """Return the charts in the order of the page."""
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
    yield Figure(title, text, speed_ups(values))


def _speed_by_batch_size(table: list[Row]) -> Iterator[Figure]:
    runs = [row.run for row in table]
    if len({run.batch_size for run in runs}) < 2:
        return
    values = [{"series": _series(run), "x": run.batch_size, "y": run.tokens_per_s} for run in runs if run.batch_size]
    spec = lines(values, "records at once", "tokens per second", ordinal=True)
    yield Figure("Speed against batch size", "Output tokens over the whole time, prompts included.", spec)


def _acceptance_by_position(table: list[Row]) -> Iterator[Figure]:
    values = [
        {"series": row.run.name, "x": position, "y": rate}
        for row in table
        for position, rate in enumerate(row.run.acceptance_by_position[:POSITIONS], 1)
    ]
    if values:
        text = "Of the drafts that are at least this long, the share accepted up to and including this position."
        yield Figure("Acceptance by position", text, lines(values, "position in the draft", "accepted"))


def _acceptance_by_record(results: Results) -> Iterator[Figure]:
    values = [
        {"series": name, "value": rate}
        for name, detail in results.details.items()
        if detail
        for rate in detail.acceptance_by_record
    ]
    if values:
        text = "How much speculation's success differs from record to record."
        spec = histogram(values, "accepted share of a record's drafts")
        yield Figure("Acceptance by record", text, spec)


def _step_cost(results: Results) -> Iterator[Figure]:
    """Yield the curve of the candidate that measured the largest steps, with the roofline."""
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
