"""Which run another may be compared with: plain decoding on the same runner, with as many records at once.

    >>> plain = Setting("none-b8", "vllm", "none", 8)
    >>> plain_of(Setting("a", "vllm", "context", 8), [plain]), plain_of(Setting("b", "vllm", "context", 4), [plain])
    (0, None)

Everything that says "plain" (results.json, the table, the report) asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ragspec.benchmark.results import RECORD_SPEED, SPEED, Ratio, Results, Run
from ragspec.speculation.methods import PLAIN


class Setting(NamedTuple):
    """What makes two runs comparable. batch_size: None if unknown. peer: whether it is another tool.

    workers: None if it answers in one process. order: of passages in prompts.
    """

    name: str
    runner: str
    method: str
    batch_size: int | None
    peer: bool = False
    workers: int | None = None
    order: str = "rank"


def plain_of(setting: Setting, others: Sequence[Setting]) -> int | None:
    """Return the place in `others` of the run to compare `setting` with, None if there is none."""
    for place, other in enumerate(others):
        alike = _place(other) == _place(setting)
        if other.method == PLAIN and alike and not other.peer:
            return place
    return None


def fewest_of(setting: Setting, others: Sequence[Setting]) -> int | None:
    """Return the place in `others` of the same run on the fewest workers, None if that is `setting` itself."""
    alike = [
        (other.workers or 0, place)
        for place, other in enumerate(others)
        if other._replace(name="", workers=None) == setting._replace(name="", workers=None)
    ]
    fewest = min(alike, default=None)
    return None if fewest is None or fewest[0] >= (setting.workers or 0) else fewest[1]


def by_rank_of(setting: Setting, others: Sequence[Setting]) -> int | None:
    """Return the place in `others` of the same run with passages by rank, None if that is `setting` itself."""
    wanted = setting._replace(name="", order="rank")
    places = [place for place, other in enumerate(others) if other._replace(name="") == wanted]
    return places[0] if places and setting.order != "rank" else None


def _place(setting: Setting) -> tuple[str, int | None, int | None, str]:
    return setting.runner, setting.batch_size, setting.workers, setting.order


def baselines(runs: Sequence[Run]) -> dict[str, str | None]:
    """Return, by candidate, the name of the one to compare it with, None if that did not run."""
    settings = list({run.name: _setting_of(run) for run in runs}.values())
    places = {setting.name: plain_of(setting, settings) for setting in settings}
    return {name: None if place is None else settings[place].name for name, place in places.items()}


def ratios_to_plain(results: Results, metric: str) -> list[Ratio]:
    """Return the ratios of `metric` between candidates and their plain decoding."""
    plain = baselines(results.runs)
    return [ratio for ratio in results.ratios if ratio.metric == metric and plain.get(ratio.name) == ratio.baseline]


def ratios_to_peers(results: Results) -> list[Ratio]:
    """Return the ratios of whole runs between candidates and other tools."""
    peers = {run.name for run in results.runs if run.peer}
    return [ratio for ratio in results.ratios if ratio.metric in (SPEED, RECORD_SPEED) and ratio.baseline in peers]


def ratios_to_fewer(results: Results, metric: str) -> list[Ratio]:
    """Return the ratios of `metric` between candidates on several workers and the same on the fewest."""
    workers = {run.name: run.workers for run in results.runs}
    return [
        ratio
        for ratio in results.ratios
        if ratio.metric == metric and (workers.get(ratio.name) or 0) > (workers.get(ratio.baseline) or 0)
    ]


def ratios_to_rank(results: Results) -> list[Ratio]:
    """Return the ratios of whole runs between candidates and the same with passages by rank."""
    orders = {run.name: run.order for run in results.runs}
    peers = {run.name for run in results.runs if run.peer}
    return [
        ratio
        for ratio in results.ratios
        if ratio.metric == RECORD_SPEED
        and ratio.baseline not in peers
        and orders[ratio.name] != "rank"
        and orders[ratio.baseline] == "rank"
    ]


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
    return Setting(run.name, run.runner, run.method, run.batch_size, run.peer, run.workers, run.order)
