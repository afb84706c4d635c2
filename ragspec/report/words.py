"""The summary in words: what a reader would say after looking at all the charts."""

from __future__ import annotations

from typing import Any

WORTH = 1.02  # a gain below it is none


def summary(results: dict[str, Any]) -> list[str]:
    """Return sentences: who won by how much and how surely, whether answers changed, what the work was."""
    runs = {run["name"]: run for run in results["runs"]}
    sentences = [_verdict(results)]
    compared = [run for run in runs.values() if not run["peer"]]
    changed = [run["name"] for run in compared if run["identical"] < run["records"]]
    if not changed:
        sentences.append("Every answer is, token for token, that of plain decoding.")
    else:
        parts = ", ".join(f"{name} ({runs[name]['records'] - runs[name]['identical']})" for name in changed)
        sentences.append(
            f"Answers differ from plain decoding in {parts}; `ragspec verify` says whether that is rounding."
        )
    first = next(iter(runs.values()))
    lengths = sorted({run["output_tokens"] for run in runs.values()})
    tokens = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    mean = first["output_tokens"] / max(1, first["records"])
    sentences.append(
        f"{first['records']} records with {first['prompt_tokens']:,} prompt tokens and {tokens} output tokens "
        f"({mean:.0f} an answer): the shorter the answers, the less speculation can do."
    )
    if share := _prompt_share(first):
        sentences.append(f"{first['name']} spends {share:.0%} of its time on prompts, where no draft helps.")
    for ratio in results["ratios"]:
        if runs[ratio["baseline"]]["peer"] and ratio["metric"] == "tokens_per_s":
            sentences.append(
                f"{ratio['name']} is {_times(ratio)} as fast as {ratio['baseline'].removeprefix('peer-')}."
            )
    return sentences


def _verdict(results: dict[str, Any]) -> str:
    peers = {run["name"] for run in results["runs"] if run["peer"]}
    own = [r for r in results["ratios"] if r["metric"] == "tokens_per_s" and r["baseline"] not in peers]
    if not own:
        return "One method was timed, so there is nothing to compare it with."
    best = max(own, key=lambda ratio: ratio["median"])
    if best["low"] is not None and best["low"] <= 1.0 <= best["high"]:
        return (
            f"No clear winner: {best['name']} came to {_times(best)} the speed of {best['baseline']}, "
            "which may be chance; more passes (--repeat) would tell."
        )
    if best["median"] < WORTH:
        return (
            f"Speculation does not pay here: the best, {best['name']}, is {_times(best)} as fast as {best['baseline']}."
        )
    return f"{best['name']} is {_times(best)} as fast as {best['baseline']}, end to end."


def _times(ratio: dict[str, Any]) -> str:
    if ratio["low"] is None:
        return f"{ratio['median']:.2f} times (one pass)"
    return f"{ratio['median']:.2f} times ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _prompt_share(run: dict[str, Any]) -> float | None:
    prefill, decode = run["prefill_s"], run["decode_s"]
    return prefill / (prefill + decode) if prefill and decode else None
