"""Running a plan: one process per candidate, passes in turn (A B, B A, ...), medians, and ratios pair by pair.

Limit: interleaving needs room for all candidates' models at once; `sequential` gives that up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from ragspec.benchmark.baseline import missing
from ragspec.benchmark.passes import Passes
from ragspec.benchmark.plan import Candidate, baseline_of, setting_of
from ragspec.benchmark.process import Worker, answers_of, open_worker
from ragspec.benchmark.ratios import interval
from ragspec.errors import ConfigError
from ragspec.host.machine import machine
from ragspec.inputs.base import open_source
from ragspec.outputs.runstate import write_json

METRICS = ("tokens_per_s", "decode_tokens_per_s")
Entries = dict[str, dict[str, Any]]


def run_benchmark(
    plan: list[Candidate],
    folder: Path,
    *,
    repeat: int,
    limit: int | None,
    sequential: bool,
    console: Console,
    resume: bool = False,
) -> dict[str, Any]:
    """Run `plan` and return what `folder`/results.json then holds. Raises ConfigError and ModelError.

    resume: keep the passes that an interrupted run of the same plan left in `folder`.
    """
    with open_source(plan[0].config.input or ""):
        pass  # a missing input is known before anything loads
    store = Passes(folder, limit, resume)
    entries = {candidate.name: store.open(candidate) for candidate in plan}

    def measure(worker: Worker, number: int) -> None:
        name = worker.candidate.name
        entry = entries[name]
        if len(entry["results"]) >= number:
            return
        console.print(f"{name}: pass {number} of {repeat} ...", markup=False)
        result = worker.measure()
        if not result["records"]:
            raise ConfigError(f"{name}: no record was answered ({result['failed']} failed); see {worker.answers}")
        if result["failed"]:
            console.print(
                f"{name}: {result['failed']} records failed; see {worker.answers}", markup=False, style="yellow"
            )
        entry["results"].append(result)
        if number == repeat:
            entry["details"] = worker.details()
        store.save(worker.candidate)

    missing = [candidate for candidate in plan if len(entries[candidate.name]["results"]) < repeat]
    with ExitStack() as stack:
        workers = []
        for candidate in missing:
            worker = stack.enter_context(open_worker(candidate, folder, limit, console))
            entries[candidate.name]["ready"] = worker.ready
            if sequential:
                for number in range(1, repeat + 1):
                    measure(worker, number)
                stack.close()
            else:
                workers.append(worker)
        for number in range(1, repeat + 1):
            for worker in workers if number % 2 else reversed(workers):
                measure(worker, number)
    results = summarise(plan, folder, entries, repeat)
    if store.kept:
        results["notes"].append(f"passes kept from an earlier run: {store.kept}; they saw the machine of that time")
    write_json(folder / "results.json", results)
    return results


def summarise(plan: list[Candidate], folder: Path, entries: Entries, repeat: int) -> dict[str, Any]:
    """Return the contents of results.json."""
    names = [candidate.name for candidate in plan]
    passes = {name: entries[name]["results"][:repeat] for name in names}
    ready = {name: entries[name]["ready"] for name in names}
    sizes = {candidate.name: _batch_size(candidate, entries[candidate.name]) for candidate in plan}
    baselines = {candidate.name: baseline_of(candidate, plan, sizes) for candidate in plan}
    identical = {candidate.name: _identical(candidate, baselines[candidate.name], folder) for candidate in plan}
    settings = [setting_of(candidate, sizes) for candidate in plan]
    notes = {f"{name}: {note}" for name, message in ready.items() for note in message["notes"]}
    notes |= {missing(one, settings) for one in settings if baselines[one.name] is None and not one.peer}
    return {
        "machine": machine(),
        "versions": {key: value for name in names for key, value in ready[name]["ready"]["versions"].items()},
        "input": plan[0].config.input,
        "runs": [
            _row(candidate, number, result, ready[candidate.name], sizes[candidate.name])
            | {"identical": identical[candidate.name]}
            for candidate in plan
            for number, result in enumerate(passes[candidate.name], 1)
        ],
        "ratios": [
            ratio for candidate in plan for ratio in _ratios(candidate, baselines[candidate.name], plan, passes)
        ],
        "ratio_interval": "95%, Student's t on the logarithms of the paired ratios",
        "details": {name: entries[name]["details"] for name in names},
        "configs": {candidate.name: candidate.config.model_dump(mode="json") for candidate in plan},
        "notes": sorted(notes),
    }


def _batch_size(candidate: Candidate, entry: dict[str, Any]) -> int | None:
    """Return how many records the candidate answered at once, as far as it says so, else what was asked of it."""
    ran: int | None = entry["results"][-1].get("batch_size")
    return ran or candidate.batch_size


def _row(
    candidate: Candidate, number: int, result: dict[str, Any], ready: dict[str, Any], batch_size: int | None
) -> dict[str, Any]:
    spec = result["speculation"]
    kept = ("records", "failed", "prompt_tokens", "output_tokens", "generate_s", "prefill_s", "decode_s")
    counted = ("drafted", "accepted", "acceptance_rate", "mean_acceptance_length", "tokens_per_step")
    return {
        "name": candidate.name,
        "peer": candidate.peer,
        "runner": candidate.config.runner,
        "method": candidate.config.speculation.method,
        "batch_size": batch_size,
        "num_tokens": candidate.num_tokens or candidate.config.speculation.num_tokens,
        "repeat": number,
        **{key: result[key] for key in kept},
        "load_s": round(ready["load_s"], 3),
        "warmup_s": round(ready["warmup_s"], 3),
        "tokens_per_s": result["tokens_per_s"],
        "decode_tokens_per_s": result["decode_tokens_per_s"],
        **{key: spec[key] for key in counted},
        "acceptance_by_position": spec["acceptance_by_position"],
        "latency_s": result["latency_s"],
        "time_to_first_token_s": result["time_to_first_token_s"],
        "peak_memory_gib": result["peak_memory_gib"],
    }


def _ratios(
    candidate: Candidate, baseline: Candidate | None, plan: list[Candidate], passes: dict[str, list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Yield the candidate's ratios: to its baseline where it has one, and to every peer; a peer itself has none."""
    if candidate.peer:
        return
    for other in [baseline, *(peer for peer in plan if peer.peer)]:
        if other is None or other is candidate:
            continue
        for metric in METRICS if other is baseline else METRICS[:1]:
            pairs = zip(passes[candidate.name], passes[other.name], strict=True)
            ratios = [mine[metric] / theirs[metric] for mine, theirs in pairs if mine[metric] and theirs[metric]]
            if ratios:
                middle, low, high = interval(ratios)
                yield {
                    "name": candidate.name,
                    "baseline": other.name,
                    "metric": metric,
                    "median": round(middle, 4),
                    "low": None if low is None else round(low, 4),
                    "high": None if high is None else round(high, 4),
                    "pairs": len(ratios),
                }


def _identical(candidate: Candidate, baseline: Candidate | None, folder: Path) -> int | None:
    """Return how many of the candidate's answers are, token for token, the baseline's; None without a baseline."""
    if baseline is None:
        return None
    mine, theirs = _answers(candidate, folder), _answers(baseline, folder)
    return sum(theirs.get(key) == tokens for key, tokens in mine.items())


def _answers(candidate: Candidate, folder: Path) -> dict[str, list[int]]:
    records = (orjson.loads(line) for line in answers_of(candidate, folder).read_bytes().splitlines())
    return {record["id"]: record["token_ids"] for record in records if "token_ids" in record}
