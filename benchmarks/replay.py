"""Modelled speed-ups of a drafter on recorded answers, without a model: minutes instead of hours.

    python benchmarks/replay.py BENCHMARK_FOLDER/outputs/none-b8.jsonl [prompt_lookup]

A draft token costs a share of a step that depends on the batch size (measured once on two cores, see
docs/lab/performance.md); tokens less likely than a threshold are not drafted, and the best threshold per batch size
counts. "oracle" drafts what is right of each guess and nothing else. The last line is what drafting takes, prompts
taken in and chains at their longest. Limit: other records' prompts are drafted from whole, not by their passages.
"""

import json
import sys
import time

from ragspec.speculation.drafters.base import Drafter, RowDrafter
from ragspec.speculation.methods import HF, DrafterSettings, drafters_on

COSTS = {1: 0.035, 4: 0.15, 8: 0.24, 16: 0.33}  # batch size: cost of one more token for every row, in steps
THRESHOLDS = (0.08, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6)
ROWS = 8  # under way at once
LONGEST = 24
PASSES = 5  # of which the fastest counts

Answers = list[tuple[list[int], list[int], int]]  # of each record: prompt, answer, most tokens of an answer


def replay(drafter: Drafter, answers: Answers, threshold: float | None) -> tuple[int, int, int]:
    """Return steps, drafted and written tokens. threshold None: the oracle."""
    waiting = list(reversed(answers))
    rows: list[tuple[RowDrafter, list[int], int, int]] = []
    steps = drafted = written = 0
    while waiting or rows:
        while waiting and len(rows) < ROWS:
            prompt, answer, most = waiting.pop()
            row = drafter.open(prompt, ((0, len(prompt)),))
            row.extend(answer[:1])  # the prompt's own step wrote it
            rows.append((row, answer, most, 1))
        going = []
        for row, answer, most, at in rows:
            if at >= len(answer):
                row.close()
                continue
            draft, rest = row.propose(min(LONGEST, most - at - 1)), answer[at:]
            agreeing = next(
                (n for n, (a, b) in enumerate(zip(draft.token_ids, rest, strict=False)) if a != b),
                min(len(draft.token_ids), len(rest)),
            )
            length = (
                agreeing if threshold is None else sum(chance > threshold for chance in draft.cumulative_acceptance)
            )
            fresh = rest[: min(length, agreeing) + 1]
            steps, drafted, written = steps + 1, drafted + length, written + len(fresh)
            row.extend(fresh)
            going.append((row, answer, most, at + len(fresh)))
        rows = going
    return steps, drafted, written


def read_answers(path: str) -> Answers:
    """Return the answers that a run recorded; records that failed have none."""
    with open(path, encoding="utf-8") as file:
        lines = [line for line in map(json.loads, file) if "token_ids" in line]
    return [(line["prompt_token_ids"], line["token_ids"], line["sampling"]["max_new_tokens"]) for line in lines]


def main(path: str, method: str = "context") -> None:
    """Print the modelled speed-ups by batch size."""
    answers = read_answers(path)

    def fresh() -> Drafter:
        return drafters_on(HF, method, DrafterSettings())[method]

    runs = {threshold: replay(fresh(), answers, threshold) for threshold in THRESHOLDS}
    oracle = replay(fresh(), answers, None)
    print(f"{len(answers)} records, {sum(len(answer) for _, answer, _ in answers):,} output tokens, {method}")
    for size, cost in COSTS.items():
        speed = {key: written / (steps + cost * drafted) for key, (steps, drafted, written) in runs.items()}
        best = max(speed, key=lambda key: speed[key])
        steps, drafted, written = oracle
        print(f"batch {size}: {speed[best]:.2f}x (threshold {best}), oracle {written / (steps + cost * drafted):.2f}x")
    least = min(drafting_s(fresh(), answers) for _ in range(PASSES))
    print(f"drafting: {least * 1e6:.0f} us a row and step")


def drafting_s(drafter: Drafter, answers: Answers) -> float:
    """Return the seconds for each token, where none of the drafts is taken."""
    started = time.perf_counter()
    steps, _, _ = replay(drafter, answers, 1.0)
    return (time.perf_counter() - started) / steps


if __name__ == "__main__":
    main(*sys.argv[1:])
