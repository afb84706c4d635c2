"""benchmarks/results/*.json as the tables of docs/lab/performance.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
COLUMNS = ("", "batch", "tokens/s", "vs plain", "decode tokens/s", "vs plain", "accepted", "tokens a step", "identical")
PEERS = (
    "records",
    "machine",
    "at once",
    "plain / vLLM plain",
    "`context` / vLLM's faster method",
    "the same, with loading",
)
PLAIN = ("records", "machine", "runner", "at once", "method", "end to end", "in decoding")
TEN = ("records", "machine", "at once", "end to end", "in decoding")
SETS = ("QuoteSum", "XQuAD, shared passages", "long documents, shared", "PubMedQA", "Spec-Bench, RAG part")
TEN_ROWS = """\
## In ten rows

How many times as fast method `context` is as plain decoding on the same engine, on two CPU cores: of each set of
records, the fewest and the most at once that were timed. An interval that contains 1 shows no difference.
[Results](../results.md) has a GPU's figures.
"""
APPENDIX = "# Appendix: every table\n"
WHOLE = ("load_s", "warmup_s", "generate_s")
ORDERED = ("", "batch", "tokens/s", "prompt tokens computed", "accepted", "tokens a step", "F1 against references")
ENOUGH = 3  # pairs of passes for an interval
SUMMED = """\
Each row sums up a table below, which has the versions, the command and the rest. Machines differ: compare within a row.
"""
Results = dict[str, Any]


def tables(folder: Path = RESULTS) -> str:
    """Return an overview, and a section for each result file, in the order of their names."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    labelled = [results for results in found if "label" in results]
    return "\n".join([*_ten_rows(labelled), APPENDIX, *_overview(labelled), *map(_section, found)])


def _ten_rows(found: Sequence[Results]) -> Iterator[str]:
    """Yield a table of `context` beside plain decoding: of each set, the fewest and the most records at once.

    Where several runs have these, the first counts, whatever it shows.
    """
    yield TEN_ROWS
    yield from map(_line, [TEN, ["---"] * len(TEN)])
    for label in SETS:
        rows: dict[int, list[str]] = {}
        for results in found:
            if results["label"] == label:
                for _, machine, runner, size, method, whole, decoding in _beside_plain(results):
                    if (runner, method) == ("huggingface", "context"):
                        rows.setdefault(int(size), [label, machine, size, whole, decoding])
        for size in dict.fromkeys((min(rows), max(rows))) if rows else ():
            yield _line(rows[size])
    yield ""


def _overview(found: Sequence[Results]) -> Iterator[str]:
    """Yield two tables over all results that have a label: compared with vLLM, and with plain decoding."""
    beside = [row for results in found if (row := _beside_vllm(results))]
    if found:
        yield SUMMED
    if beside:
        yield "## Overview: compared with vLLM\n"
        yield from map(_line, [PEERS, ["---"] * len(PEERS), *beside])
        yield ""
    faster = [row for results in found for row in _beside_plain(results)]
    if faster:
        yield "## Overview: compared with plain decoding on the same engine\n"
        yield from map(_line, [PLAIN, ["---"] * len(PLAIN), *faster])
        yield ""


def _beside_vllm(results: Results) -> list[str] | None:
    """Return a row of the overview: how fast plain decoding and drafts are, in what vLLM does."""
    runs = {name: _runs(results, name) for name in _names(results)}
    peers = [name for name in runs if name.startswith("peer-vllm")]
    ours = {runs[name][0]["method"]: name for name in runs if not runs[name][0]["peer"]}
    if not peers or not {"none", "context"} <= set(ours):
        return None
    best = max(peers, key=lambda name: _middle(runs[name], "tokens_per_s"))
    loaded = {name: median(sum(run[key] for key in WHOLE) for run in runs[name]) for name in (best, ours["context"])}
    first = runs[ours["context"]][0]
    return [
        results["label"],
        _processor(results),
        str(first["batch_size"]),
        _ratio_of(results, ours["none"], "peer-vllm"),
        _ratio_of(results, ours["context"], best),
        f"{loaded[best] / loaded[ours['context']]:.1f}x",
    ]


def _beside_plain(results: Results) -> Iterator[list[str]]:
    """Yield rows of the overview: how fast each method is, in plain decoding."""
    for name in _names(results):
        first = _runs(results, name)[0]
        if first["peer"] or first["method"] == "none" or not _ratio(results, name, "tokens_per_s"):
            continue
        whole, decoding = (_ratio(results, name, metric) for metric in ("tokens_per_s", "decode_tokens_per_s"))
        where = [_processor(results), first["runner"], str(first["batch_size"])]
        yield [results["label"], *where, first["method"], whole, decoding]


def _processor(results: Results) -> str:
    """Return a short name of the machine's processor."""
    return re.sub(r"\(\w+\)| Processor", "", results["machine"]["processor"])


def _names(results: Results) -> list[str]:
    """Return what was timed, in order."""
    return list(dict.fromkeys(run["name"] for run in results.get("runs", ())))


def _runs(results: Results, name: str) -> list[Results]:
    """Return the passes of what was timed under a name."""
    return [run for run in results["runs"] if run["name"] == name]


def _middle(runs: Sequence[Results], key: str) -> float:
    return median(run[key] for run in runs)


def _ratio_of(results: Results, name: str, baseline: str) -> str:
    """Return the ratio of two runs, end to end."""
    wanted = name, baseline, "tokens_per_s"
    found = [each for each in results["ratios"] if (each["name"], each["baseline"], each["metric"]) == wanted]
    return _times(found[0]) if found else ""


def _section(results: Results) -> str:
    conditions = fill(f"{results['input']}. {_conditions(results)}", 118, break_on_hyphens=False)
    head = f"## {results['question']}\n\n{conditions}\n\n    {results['command']}\n"
    columns, rows = (results["columns"], results["rows"]) if "rows" in results else _table(results)
    lines = [_line(columns), _line(["---"] * len(columns)), *map(_line, rows)]
    return head + "\n" + "\n".join(lines) + "\n" + _note(results)


def _conditions(results: Results) -> str:
    """Return where and with what it was measured."""
    machine = results["machine"]
    gpus = "".join(f", {gpu}" for gpu in machine["gpus"])
    parts = [f"{machine['processor']}, {machine['cores']} cores{gpus}"]
    parts.append(", ".join(f"{name} {version}" for name, version in results["versions"].items() if name != "python"))
    if "runs" in results:
        parts += [
            f"{_passes(results)}",
            f"{_range(run['output_tokens'] for run in results['runs'])} output tokens a pass",
        ]
    return "; ".join(parts) + "."


def _passes(results: Results) -> str:
    passes = {run["repeat"] for run in results["runs"]}
    return "one pass each" if len(passes) == 1 else f"{len(passes)} passes each, in turn"


def _table(results: Results) -> tuple[Any, list[list[str]]]:
    """Return what is shown of the runs: where passages stand in several orders, what that changes."""
    if len({_order(run) for run in results["runs"]}) > 1:
        return ORDERED, list(_ordered(results))
    return COLUMNS, list(_rows(results))


def _ordered(results: Results) -> Iterator[list[str]]:
    for name in _names(results):
        runs = _runs(results, name)
        first, quality = runs[0], results.get("quality", {}).get(name)
        computed, whole = first["prompt_tokens"] - (first["cached_prompt_tokens"] or 0), first["prompt_tokens"]
        yield [
            _who(first),
            str(first["batch_size"] or ""),
            _figure(runs, "tokens_per_s", "{:.1f}"),
            f"{computed:,} of {whole:,} ({computed / whole:.0%})",
            _figure(runs, "acceptance_rate", "{:.0%}"),
            _figure(runs, "tokens_per_step", "{:.2f}"),
            _quality(quality).removeprefix("F1 ") if quality else "",
        ]


def _who(run: Results) -> str:
    peer = ", as its users run it" if run["peer"] else ""
    workers = f", {run['workers']} workers" if run.get("workers") else ""
    return f"{run['method']}{_order(run)}{peer} ({run['runner']}{workers})"


def _rows(results: Results) -> Iterator[list[str]]:
    """Yield a row for each thing that was timed: medians of its passes."""
    for name in _names(results):
        runs = _runs(results, name)
        first = runs[0]
        yield [
            _who(first),
            str(first["batch_size"] or ""),
            _figure(runs, "tokens_per_s", "{:.1f}"),
            _ratio(results, name, "tokens_per_s"),
            _figure(runs, "decode_tokens_per_s", "{:.1f}"),
            _ratio(results, name, "decode_tokens_per_s"),
            _figure(runs, "acceptance_rate", "{:.0%}"),
            _figure(runs, "tokens_per_step", "{:.2f}"),
            "" if first["identical"] is None else f"{min(run['identical'] for run in runs)} of {first['records']}",
        ]


def _figure(runs: list[Results], key: str, form: str) -> str:
    values = [run[key] for run in runs if run[key] is not None]
    return form.format(median(values)) if values else ""


def _ratio(results: Results, name: str, metric: str) -> str:
    """Return the ratio to plain decoding of the same runner and batch size, with its interval where there is one."""
    orders = {run["name"]: _order(run) for run in results["runs"]}
    plain = {run["name"] for run in results["runs"] if run["method"] == "none" and not run["peer"]}
    for ratio in results["ratios"]:
        alike = orders[name] == orders[ratio["baseline"]]
        if ratio["name"] == name and ratio["metric"] == metric and ratio["baseline"] in plain and alike:
            return _times(ratio)
    return ""


def _order(run: Results) -> str:
    """Return how a run's passages stand, where not by rank."""
    order = run.get("order", "rank")
    return "" if order == "rank" else f", {order} order"


def _times(ratio: Results) -> str:
    """Return a ratio with its interval, where there is one."""
    low, high = ratio["low"], ratio["high"]
    few = low is None or ratio["pairs"] < ENOUGH  # two pairs tell next to nothing of their spread
    interval = "" if few else f" ({low:.2f} to {high:.2f})"
    return f"{ratio['median']:.2f}x{interval}"


def _note(results: Results) -> str:
    """Return the ratios to other tools and to other orders of passages, and the quality of answers, in words."""
    runs = results.get("runs", ())
    peers, orders = {run["name"] for run in runs if run["peer"]}, {run["name"]: _order(run) for run in runs}
    found = [
        ratio
        for ratio in results.get("ratios", ())
        if ratio["metric"] in ("tokens_per_s", "records_per_s")
        and (ratio["baseline"] in peers or orders[ratio["baseline"]] != orders[ratio["name"]])
    ]
    said = [
        f"{ratio['name']} runs at {_times(ratio)} the speed of {ratio['baseline']}{_unit(ratio)}" for ratio in found
    ]
    if len(set(orders.values())) == 1:
        said += [f"{name}: {_quality(quality)}" for name, quality in results.get("quality", {}).items()]
    return f"\n{fill('; '.join(said) + '.', 118, break_on_hyphens=False)}\n" if said else ""


def _unit(ratio: Results) -> str:
    return " in records a second" if ratio["metric"] == "records_per_s" else ""


def _quality(quality: Results) -> str:
    """Return a run's F1, and by how much it differs from the one it is held against."""
    f1, apart = quality["scores"]["f1"], quality["differences"].get("f1")
    if not apart:
        return f"F1 {f1['mean']:.1f}"
    interval = f"({apart['low']:+.1f} to {apart['high']:+.1f})"
    return f"F1 {f1['mean']:.1f}, {apart['mean']:+.1f} {interval} against {quality['baseline']}"


def _range(values: Any) -> str:
    low, high = min(found := list(values)), max(found)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _line(cells: Any) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
