"""The benchmark's results as a table on stderr."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragspec.benchmark.baseline import baselines, ratios_to_peers, ratios_to_plain
from ragspec.benchmark.results import NAME, SPEED, Ratio, Results

COLUMNS = ("method", "tokens/s", "vs plain", "decode tokens/s", "acceptance", "tokens/step", "output", "identical")


def print_results(console: Console, results: Results, folder: Path) -> None:
    """Print one row per candidate: medians over passes, and the paired ratio to its plain decoding."""
    machine = results.machine
    console.print(f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB", *machine["gpus"])
    for note in results.notes:
        console.print(f"note: {note}", markup=False, style="yellow")
    console.print(_table(results))
    for ratio in ratios_to_peers(results, SPEED):
        console.print(f"{ratio.name} is {_shown(ratio)} {ratio.baseline}", markup=False)
    console.print(f"results in {folder / NAME}, answers in {folder / 'outputs'}", markup=False)


def _table(results: Results) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in COLUMNS:
        table.add_column(title, justify="left" if title == "method" else "right")
    plain = baselines(results.runs)
    to_plain = {ratio.name: ratio for ratio in ratios_to_plain(results, SPEED)}
    for name in results.names:
        runs = results.runs_of(name)
        first = runs[0]
        table.add_row(
            Text(name),
            _median([run.tokens_per_s for run in runs]),
            _shown(to_plain[name]) if name in to_plain else "-",
            _median([run.decode_tokens_per_s for run in runs]),
            "-" if first.acceptance_rate is None else f"{first.acceptance_rate:.1%}",
            f"{first.tokens_per_step or 0:.2f}",
            f"{first.output_tokens:,}",
            "-" if plain[name] is None else f"{first.identical} of {first.records}",
        )
    return table


def _median(speeds: list[float | None]) -> str:
    known = [speed for speed in speeds if speed]
    return f"{median(known):.1f}" if known else "-"


def _shown(ratio: Ratio) -> str:
    interval = "" if ratio.interval is None else " ({:.2f} to {:.2f})".format(*ratio.interval)
    return f"{ratio.median:.2f}x{interval}"
