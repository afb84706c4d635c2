"""What drafting takes on the host: microseconds a row and step, in C++ and in Python.

Critical is what stands between a step's result and the next launch; overlapped is done while the model computes.

    python benchmarks/drafting.py RECORDS --rows 64

RECORDS: records with "query" and "contexts", or answers that a run recorded ("prompt_token_ids", "token_ids"). Tokens
of records are words and signs; without an "answer", sentences of the passages stand for one, with words changed. Each
step drafts for all rows, cuts drafts to what pays and emits what is right of them. A second pass has no cost model, so
that all drafts are as long as their matches allow. Limit: the engine's own loop over rows is not part of it.
"""

import argparse
import gc
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import cast

from ragspec.engine.proposers.base import LONGEST, cut
from ragspec.engine.request_state import RequestState
from ragspec.speculation.draft_length import least_acceptance
from ragspec.speculation.drafters.base import Drafter, RowDrafter, propose_all, settle
from ragspec.speculation.drafters.calibration import follow_to
from ragspec.speculation.methods import HF, DrafterSettings, drafters_on
from ragspec.speculation.step_cost import StepCost

# seconds of steps on a GPU with few rows: nearly the same for any tokens, so that long drafts pay
STEP_POINTS = [(1, 0.010), (64, 0.011), (256, 0.013), (1024, 0.022), (4096, 0.070)]
WRONG = 0.06  # share of an answer's words that no passage has
LEAST_RECORDS = 1000  # fewer come again, with other answers
WARM = 8  # records and steps before those that count
SENTENCES = 4  # of a passage, in an answer
CRITICAL = ("propose", "cut", "extend")  # between a step's result and the next launch
OVERLAPPED = ("open", "settle", "close")  # while the model computes


@dataclass
class Text:
    """A record's tokens."""

    prompt: list[int]
    passages: list[tuple[int, int]]
    answer: list[int]


@dataclass
class Spent:
    """Seconds of the parts of drafting, and what they were for."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*CRITICAL, *OVERLAPPED), 0.0))
    critical: list[float] = field(default_factory=list)  # seconds a row of each step
    rows: int = 0  # rows of all steps
    steps: int = 0
    drafted: int = 0
    written: int = 0
    indexed: int = 0  # tokens of prompts and of finished answers

    def add(self, part: str, since: float) -> float:
        """Count the seconds of a part; return the time."""
        now = time.perf_counter()
        self.seconds[part] += now - since
        return now

    def between(self) -> float:
        """Return the seconds so far between a step's result and the next launch."""
        return sum(self.seconds[part] for part in CRITICAL)


class Words:
    """Token ids of words and signs."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [self._ids.setdefault(word, len(self._ids)) for word in re.findall(r"\w{1,5}|[^\w\s]", text)]


def read_texts(path: Path, prompt_tokens: int) -> list[Text]:
    """Return the records' tokens. prompt_tokens: least tokens of a prompt, which others' passages fill; 0: as it is."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    recorded = [line for line in lines if "prompt_token_ids" in line and "token_ids" in line]
    if recorded:
        prompts = [line["prompt_token_ids"] for line in recorded]
        return [
            Text(prompt, [(0, len(prompt))], line["token_ids"]) for prompt, line in zip(prompts, recorded, strict=True)
        ]
    words, chance, texts = Words(), random.Random(0), []
    contexts = [[each if isinstance(each, str) else each["text"] for each in line["contexts"]] for line in lines]
    for number in range(max(LEAST_RECORDS, len(lines))):
        line = lines[number % len(lines)]
        prompt, spans = words.encode("Answer the question from the passages."), []
        passages, more = list(contexts[number % len(lines)]), number
        while passages:
            start = len(prompt)
            prompt += words.encode(passages.pop(0))
            spans.append((start, len(prompt)))
            if not passages and len(prompt) < prompt_tokens:
                more += 1
                passages = list(contexts[more % len(contexts)])
        prompt += words.encode(line["query"])
        texts.append(Text(prompt, spans, _answer(line, contexts[number % len(lines)], words, chance)))
    return texts


def _answer(line: dict[str, object], passages: list[str], words: Words, chance: random.Random) -> list[int]:
    given = line.get("answer")
    if isinstance(given, str):
        return words.encode(given)
    sentences = [each for passage in passages for each in re.split(r"(?<=[.!?])\s", passage)]
    answer = words.encode(" ".join(chance.choices(sentences, k=SENTENCES)))
    return [chance.randrange(5000) if chance.random() < WRONG else token for token in answer]


def replay(drafter: Drafter, texts: list[Text], rows: int, cost: StepCost | None, longest: int, steps: int) -> Spent:
    """Return what drafting for `rows` rows at once took."""
    spent, coming = Spent(), cycle(texts)
    here: list[tuple[RowDrafter, list[int], int]] = []
    done: list[RowDrafter] = []
    while spent.steps < steps:
        while len(here) < rows:
            text = next(coming)
            began = time.perf_counter()
            row = drafter.open(text.prompt, text.passages)
            spent.add("open", began)
            spent.indexed += len(text.prompt)
            row.extend(text.answer[:1])
            here.append((row, text.answer, 1))
        before, began = spent.between(), time.perf_counter()
        if cost is not None:
            follow_to(drafter, least_acceptance(len(here), cost, 0))
        drafts = propose_all(drafter, [row for row, _, _ in here], [longest] * len(here))
        began = spent.add("propose", began)
        drafts = cut(drafts, cast(Sequence[RequestState], Rows(len(here))), cost, 0)
        began = spent.add("cut", began)  # the model computes from here on
        settle(drafter)
        began = spent.add("settle", began)
        for row in done:
            row.close()
        spent.add("close", began)
        fresh = []
        for (_, answer, at), draft in zip(here, drafts, strict=True):
            right = 0
            for guess, token in zip(draft.token_ids, answer[at:], strict=False):
                if guess != token:
                    break
                right += 1
            fresh.append(answer[at : at + right + 1])
        spent.drafted += sum(len(draft.token_ids) for draft in drafts)
        spent.written += sum(map(len, fresh))
        began = time.perf_counter()
        for (row, _, _), token_ids in zip(here, fresh, strict=True):
            row.extend(token_ids)
        spent.add("extend", began)
        spent.critical.append((spent.between() - before) / len(here))
        spent.rows, spent.steps = spent.rows + len(here), spent.steps + 1
        now = [(row, answer, at + len(token_ids)) for (row, answer, at), token_ids in zip(here, fresh, strict=True)]
        done = [row for row, answer, at in now if at >= len(answer)]
        spent.indexed += sum(len(answer) for _, answer, at in now if at >= len(answer))
        here = [each for each in now if each[2] < len(each[1])]
    return spent


class Rows(list[object]):
    """As many rows as a step has, of which cut() asks how far they reach."""

    def __init__(self, count: int) -> None:
        super().__init__([Row()] * count)


class Row:
    """What cut() asks of a row."""

    tokens: tuple[int, ...] = ()
    computed = 0


def report(name: str, spent: Spent) -> None:
    """Print the microseconds of each part."""
    each = {part: 1e6 * seconds / spent.rows for part, seconds in spent.seconds.items()}
    critical = sum(each[part] for part in CRITICAL)
    parts = ", ".join(f"{part} {each[part]:.1f}" for part in CRITICAL)
    overlapped = ", ".join(f"{part} {each[part]:.1f}" for part in OVERLAPPED)
    indexing = 1e6 * (spent.seconds["open"] + spent.seconds["close"]) / spent.indexed
    print(
        f"{name}: {critical:.1f} us a row and step critical (median step {1e6 * median(spent.critical):.1f}; {parts}), "
        f"{sum(each[part] for part in OVERLAPPED):.1f} overlapped ({overlapped}); {indexing:.2f} us a token to index; "
        f"{spent.drafted / spent.rows:.1f} tokens drafted and {spent.written / spent.rows:.2f} written a row and step"
    )


def main() -> None:
    """Print what drafting takes, compiled and in Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--rows", type=int, default=64, help="rows at once")
    parser.add_argument("--steps", type=int, default=300, help="most steps of a pass")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="least tokens of a prompt; 0: as they are")
    parser.add_argument("--longest", type=int, default=LONGEST, help="most tokens of a draft")
    parser.add_argument("--method", default="context")
    given = parser.parse_args()
    texts = read_texts(given.records, given.prompt_tokens)
    gc.freeze()  # the records are not drafting's
    mean = sum(len(text.prompt) for text in texts) / len(texts)
    print(f"{len(texts)} records, {mean:.0f} tokens a prompt, {given.rows} rows, {given.method}")
    for native in (True, False):
        for cost in (StepCost(STEP_POINTS), None):
            drafter = drafters_on(HF, given.method, DrafterSettings(native=native))[given.method]
            replay(drafter, texts[:WARM], WARM, cost, given.longest, WARM)
            spent = replay(drafter, texts, given.rows, cost, given.longest, given.steps)
            report(f"{'C++' if native else 'Python'}, {'what pays' if cost else 'all'}", spent)


if __name__ == "__main__":
    main()
