"""Which run another may be compared with: plain decoding on the same runner, with as many records at once.

    >>> plain = Setting("none-b8", "vllm", "none", 8)
    >>> plain_of(Setting("a", "vllm", "context", 8), [plain]), plain_of(Setting("b", "vllm", "context", 4), [plain])
    (0, None)

Everything that says "plain" (results.json, the table, the report) asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ragspec.benchmark.results import Ratio, Results, Run
from ragspec.speculation.methods import PLAIN


class Setting(NamedTuple):
    """What makes two runs comparable. batch_size: None if unknown. peer: whether it is another tool."""

    name: str
    runner: str
    method: str
    batch_size: int | None
    peer: bool = False


def plain_of(setting: Setting, others: Sequence[Setting]) -> int | None:
    """Return the place in `others` of the run to compare `setting` with, None if there is none."""
    for place, other in enumerate(others):
        alike = (other.runner, other.batch_size) == (setting.runner, setting.batch_size)
        if other.method == PLAIN and alike and not other.peer:
            return place
    return None


def baselines(runs: Sequence[Run]) -> dict[str, str | None]:
    """Return, by candidate, the name of the one to compare it with, None if that did not run."""
    settings = list({run.name: _setting_of(run) for run in runs}.values())
    places = {setting.name: plain_of(setting, settings) for setting in settings}
    return {name: None if place is None else settings[place].name for name, place in places.items()}


def ratios_to_plain(results: Results, metric: str) -> list[Ratio]:
    """Return the ratios of `metric` between candidates and their plain decoding."""
    plain = baselines(results.runs)
    return [ratio for ratio in results.ratios if ratio.metric == metric and plain.get(ratio.name) == ratio.baseline]


def ratios_to_peers(results: Results, metric: str) -> list[Ratio]:
    """Return the ratios of `metric` between candidates and other tools."""
    peers = {run.name for run in results.runs if run.peer}
    return [ratio for ratio in results.ratios if ratio.metric == metric and ratio.baseline in peers]


def missing(setting: Setting, others: Sequence[Setting]) -> str:
    """Return which plain run `setting` lacks among `others`, and the flag that adds it."""
    ran = any(other.runner == setting.runner and other.method == PLAIN and not other.peer for other in others)
    size = "its own batch size" if setting.batch_size is None else f"batch size {setting.batch_size}"
    flag = f"--batch-size {setting.batch_size}" if ran and setting.batch_size is not None else f"--method {PLAIN}"
    return (
        f"{setting.name} is not compared with plain decoding, which did not run on {setting.runner} at {size}; "
        f"{flag} adds it"
    )


def _setting_of(run: Run) -> Setting:
    return Setting(run.name, run.runner, run.method, run.batch_size, run.peer)
