"""The benchmark's results as a table on stderr."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragspec.benchmark.baseline import baselines, ratios_to_peers, ratios_to_plain
from ragspec.errors import ConfigError


def read_results(folder: Path) -> dict[str, Any]:
    """Return the contents of `folder`/results.json. Raises ConfigError."""
    path = folder / "results.json"
    try:
        results: dict[str, Any] = orjson.loads(path.read_bytes())
        if not isinstance(results, dict) or "details" not in results:
            raise ConfigError(f"{path}: not the results of `ragspec benchmark`, or of an old one; run it again")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the folder of a finished benchmark") from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    return results


def print_results(console: Console, results: dict[str, Any], folder: Path) -> None:
    """Print one row per candidate: medians over passes, and the paired ratio to plain decoding of its kind."""
    machine = results["machine"]
    console.print(f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB", *machine["gpus"])
    for note in results["notes"]:
        console.print(f"note: {note}", markup=False, style="yellow")
    table = Table(box=None, pad_edge=False)
    for title in (
        "method",
        "tokens/s",
        "vs plain",
        "decode tokens/s",
        "acceptance",
        "tokens/step",
        "output",
        "identical",
    ):
        table.add_column(title, justify="left" if title == "method" else "right")
    plain = baselines(results["runs"])
    to_plain = [ratio for ratio in ratios_to_plain(results) if ratio["metric"] == "tokens_per_s"]
    for name in dict.fromkeys(run["name"] for run in results["runs"]):
        runs = [run for run in results["runs"] if run["name"] == name]
        rate = runs[0]["acceptance_rate"]
        table.add_row(
            Text(name),
            _median(runs, "tokens_per_s"),
            next((_shown(ratio) for ratio in to_plain if ratio["name"] == name), "-"),
            _median(runs, "decode_tokens_per_s"),
            "-" if rate is None else f"{rate:.1%}",
            f"{runs[0]['tokens_per_step'] or 0:.2f}",
            f"{runs[0]['output_tokens']:,}",
            "-" if plain[name] is None else f"{runs[0]['identical']} of {runs[0]['records']}",
        )
    console.print(table)
    for ratio in ratios_to_peers(results):
        if ratio["metric"] == "tokens_per_s":
            console.print(f"{ratio['name']} is {_shown(ratio)} {ratio['baseline']}", markup=False)
    console.print(f"results in {folder / 'results.json'}, answers in {folder / 'outputs'}", markup=False)


def _median(runs: list[dict[str, Any]], metric: str) -> str:
    values = [run[metric] for run in runs if run[metric]]
    return f"{median(values):.1f}" if values else "-"


def _shown(ratio: dict[str, Any]) -> str:
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"{ratio['median']:.2f}x{interval}"
