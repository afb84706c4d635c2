"""The report's table: one row per candidate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from ragspec.benchmark.baseline import baselines, ratios_to_plain
from ragspec.benchmark.results import SPEED, Ratio, Results, Run


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate. run: its first pass, with medians over all passes for its speeds. ratio: to plain decoding."""

    run: Run
    passes: int
    ratio: Ratio | None


def rows(results: Results) -> list[Row]:
    """Return the rows; `ratio` and `run.identical` are None where there is no plain run to compare with."""
    plain = baselines(results.runs)
    to_plain = {ratio.name: ratio for ratio in ratios_to_plain(results, SPEED)}
    table = []
    for name in results.names:
        runs = results.runs_of(name)
        typical = replace(
            runs[0],
            tokens_per_s=_median([run.tokens_per_s for run in runs]),
            decode_tokens_per_s=_median([run.decode_tokens_per_s for run in runs]),
            identical=None if plain[name] is None else runs[0].identical,
        )
        table.append(Row(typical, len(runs), to_plain.get(name)))
    return table


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value]
    return median(known) if known else None
