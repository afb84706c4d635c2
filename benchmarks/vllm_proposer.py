"""What our proposer takes of each step of vLLM, on the host: milliseconds a step (of CPU time), by its rows.

    python benchmarks/vllm_proposer.py RECORDS --rows 8 64 256

Calls it as vLLM 0.32 does after each step, with the texts of drafting.py. A record that ends gives its slot to the
next; prompts are read and answers shared beside the step, which is not part of the time. Steps are given an H100's
seconds, so that drafts are cut as they would be there. Limit: vLLM's own work is not part of it.
"""

import argparse
import gc
import statistics
import time
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks.drafting import Text, read_texts
from ragspec.runners.vllm import proposer as module
from ragspec.runners.vllm.proposer import Proposer

LENGTH = 8192


class Clock:
    """Time that only passes in steps and in the proposer."""

    def __init__(self) -> None:
        self.slept = 0.0

    def perf_counter(self) -> float:
        """Return the seconds of this process, and those of the steps."""
        return time.thread_time() + self.slept


def make(drafts: int, native: bool) -> Proposer:
    """Return a proposer that follows an empty batch."""
    drafting = {"isolate": False, "native": native}
    made = Proposer(
        SimpleNamespace(
            additional_config={"ragspec": {"method": "context", "num_tokens": None, "drafting": drafting}},
            speculative_config=SimpleNamespace(num_speculative_tokens=drafts),
            model_config=SimpleNamespace(max_model_len=LENGTH),
        )
    )
    if hasattr(made, "follow"):
        made.follow(SimpleNamespace(requests={}, input_batch=SimpleNamespace(req_ids=[])))
    return made


class Batch:
    """vLLM's slots, each with a record whose answer is known."""

    def __init__(self, proposer: Proposer, rows: int) -> None:
        self.proposer = proposer
        self.tokens = np.zeros((rows, LENGTH), dtype=np.int32)
        self.lengths = np.zeros(rows, dtype=np.int32)
        self.texts: list[Text | None] = [None] * rows
        self.written = [0] * rows
        self.names = [""] * rows
        self.seconds = 0.0
        self.count = 0

    def fill(self, slot: int, text: Text) -> None:
        """Put a record into a slot."""
        self.count += 1
        self.names[slot], self.texts[slot], self.written[slot] = str(self.count), text, 0
        self.tokens[slot, : len(text.prompt)] = text.prompt
        self.lengths[slot] = len(text.prompt)
        if not hasattr(self.proposer, "follow"):
            self.proposer.expect(text.prompt, text.passages, most=len(text.answer))
            return
        told = {"ragspec": {"passages": text.passages, "drafts": True}}
        params = SimpleNamespace(extra_args=told, max_tokens=len(text.answer), structured_outputs=None)
        request = SimpleNamespace(prompt_token_ids=text.prompt, sampling_params=params)
        self.proposer.model_runner.requests[self.names[slot]] = request

    def write(self, slot: int, draft: list[int]) -> list[int]:
        """Return what the target writes after a draft."""
        text, at = self.texts[slot], self.written[slot]
        assert text is not None
        right = 0
        while right < len(draft) and at + right < len(text.answer) - 1 and draft[right] == text.answer[at + right]:
            right += 1
        fresh = text.answer[at : at + right + 1]
        start = int(self.lengths[slot])
        self.tokens[slot, start : start + len(fresh)] = fresh
        self.lengths[slot] += len(fresh)
        self.written[slot] += len(fresh)
        return fresh

    def ends(self, slot: int) -> bool:
        """Take a finished record out, and return whether it was."""
        text = self.texts[slot]
        assert text is not None
        if self.written[slot] < len(text.answer):
            return False
        if hasattr(self.proposer, "follow"):
            self.proposer.finish(self.names[slot])
            del self.proposer.model_runner.requests[self.names[slot]]
        else:
            self.proposer.finish(text.prompt, text.answer)
        return True


def replay(texts: list[Text], rows: int, steps: int, native: bool) -> tuple[list[float], float]:
    """Return the proposer's seconds of each step, and the tokens written a row and step."""
    clock = Clock()
    module.time = SimpleNamespace(perf_counter=clock.perf_counter)  # type: ignore[attr-defined]
    batch, coming = Batch(make(16, native), rows), cycle(texts)
    drafts: list[list[int]] = [[]] * rows
    for slot in range(rows):
        batch.fill(slot, next(coming))
    taken, written = [], 0
    for _ in range(steps):
        sampled = [batch.write(slot, drafts[slot]) for slot in range(rows)]
        written += sum(map(len, sampled))
        clock.slept += 0.0062 + 21e-6 * (rows + sum(map(len, drafts)))  # an 8B model on an H100
        if hasattr(batch.proposer, "follow"):
            batch.proposer.model_runner.input_batch.req_ids = batch.names
        if hasattr(batch.proposer, "settle"):
            batch.proposer.settle()  # while the device computes
        began = time.thread_time()
        drafts = batch.proposer.propose(sampled, batch.lengths, batch.tokens)
        for slot in range(rows):
            if batch.texts[slot] is not None and batch.ends(slot):
                drafts[slot] = []
                batch.texts[slot] = None
        taken.append(time.thread_time() - began)
        for slot in range(rows):
            if batch.texts[slot] is None:
                batch.fill(slot, next(coming))
    return taken, written / rows / steps


def main() -> None:
    """Print what the proposer takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--python", action="store_true", help="without compiled drafters")
    given = parser.parse_args()
    texts = read_texts(given.records, given.prompt_tokens)
    gc.freeze()
    for rows in given.rows:
        taken, written = replay(texts, rows, given.steps, not given.python)
        later = sorted(taken[len(taken) // 5 :])
        print(
            f"{rows} rows: {1e3 * statistics.mean(later):.3f} ms a step, median {1e3 * statistics.median(later):.3f}, "
            f"{written:.2f} tokens written a row and step"
        )


if __name__ == "__main__":
    main()
