"""The report's table: one row per candidate."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ragspec.benchmark.baseline import baselines, ratios_to_plain
from ragspec.benchmark.results import SPEED, Ratio, Results, Run


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate. run: its passes as one. ratio: to plain decoding."""

    run: Run
    passes: int
    ratio: Ratio | None


def rows(results: Results) -> list[Row]:
    """Return the rows; `ratio` and `run.identical` are None where there is no plain run to compare with."""
    plain = baselines(results.runs)
    to_plain = {ratio.name: ratio for ratio in ratios_to_plain(results, SPEED)}
    table = []
    for name in results.names:
        run = results.typical(name)
        if plain[name] is None:
            run = replace(run, identical=None)
        table.append(Row(run, len(results.runs_of(name)), to_plain.get(name)))
    return table
