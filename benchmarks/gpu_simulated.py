"""What a run would take on a GPU: ragspec itself, with a device whose steps take what they were measured to take.

    python benchmarks/gpu_simulated.py RECORDS.jsonl --at-once 16 64 --methods none context [--steps]

Everything on the host is real: prompts, scheduling, drafts, steps filled and read, answers written. A step over the
paged cache computes nothing: its tokens are those of answers that the demo model has given before, which are kept in
--answers, and a clock that all of ragspec reads moves on by what the step takes on the device (a Llama of 8B in
bfloat16 on an H100, `benchmarks/gpu_steps.py`), beside the host or while it waits. Not a measurement of a GPU, but of
what is between its steps and of which steps are chosen. Limits: no compiling; this machine's host, not the GPU's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from host_time import build

import ragspec
from ragspec.engine import backend
from ragspec.engine.backends import steps
from ragspec.engine.backends.graphs import StepOutputs
from ragspec.engine.backends.step_buffers import Step, StepWork
from ragspec.engine.backends.step_shapes import StepShape
from ragspec.engine.engine import CHUNK_CUDA, Engine
from ragspec.models.resolve import resolve
from ragspec.records import Generation

# ms of everything but attention, by tokens of a step, padding included
LINEAR_MS = {1: 6.37, 4: 6.7, 16: 6.8, 64: 7.1, 256: 9.0, 512: 13.0, 1024: 22.0, 2048: 41.0}
READ_MS = 1e3 * 131072 / 2.7e12  # of a cached token, at the memory's speed
TOKEN_SHARE = 131072 / 14.9e9  # bytes of a token's keys and values, as a share of the weights'
Answers = dict[tuple[int, ...], list[int]]  # by the prompt's tokens


def linear_ms(tokens: int) -> float:
    """Return what everything but attention takes for so many tokens."""
    sizes = list(LINEAR_MS)
    upper = sizes[min(max(1, bisect_left(sizes, tokens)), len(sizes) - 1)]
    lower = sizes[sizes.index(upper) - 1]
    slope = (LINEAR_MS[upper] - LINEAR_MS[lower]) / (upper - lower)
    return LINEAR_MS[lower] + slope * (tokens - lower)


class Device:
    """A device of its own time, and the clock that the host reads beside it. slower: how much slower the host is."""

    def __init__(self, slower: float) -> None:
        self._clock, self._slower = time.perf_counter, slower
        self._skew = 0.0  # what the host waited, less what it spent in place of the device
        self.free = 0.0  # when the last step ends
        self.idle_s = 0.0
        self.busy_s = 0.0
        self.waited_s = 0.0
        self.shapes: Counter[StepShape] = Counter()

    def now(self) -> float:
        """Return the time in seconds."""
        return self._slower * self._clock() + self._skew

    def launch(self, shape: StepShape, read: int) -> None:
        """Start a step, which reads so many cached tokens."""
        now, seconds = self.now(), 1e-3 * (linear_ms(shape.size) + READ_MS * read)
        self.idle_s += max(0.0, now - self.free)
        self.free = max(self.free, now) + seconds
        self.busy_s += seconds
        self.shapes[shape] += 1

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Leave out the time that the body takes."""
        began = self._slower * self._clock()
        yield
        self._skew -= self._slower * self._clock() - began

    def wait(self, until: float) -> None:
        """Let the host wait."""
        waited = max(0.0, until - self.now())
        self._skew += waited
        self.waited_s += waited


class Event:
    """The end of the steps launched so far, as torch.cuda.Event has it."""

    def __init__(self, device: Device) -> None:
        self._device, self._end = device, device.free

    def query(self) -> bool:
        return self._device.now() >= self._end

    def synchronize(self) -> None:
        self._device.wait(self._end)


class Simulation:
    """Puts a device under ragspec's steps. answers: what the model would write. slower: as Device has it."""

    def __init__(self, answers: Answers, slower: float) -> None:
        self.device = Device(slower)
        self._answers = answers
        self._texts: dict[int, tuple[Sequence[int], Sequence[int]]] = {}  # prompt and answer by place in the cache
        self._patches: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """Simulate from now on."""
        simulation, device = self, self.device
        do, start, logits = steps.PagedSteps._do, Engine._begin, steps.LaunchedStep.logits
        launched = steps.LaunchedStep.__init__

        def simulated(self: Any, shape: StepShape, work: StepWork) -> tuple[StepOutputs, list[int]]:
            outputs, places = do(self, shape, work)
            with device.computing():
                several = zip(work.of[work.wanted].tolist(), work.source[work.wanted].tolist(), strict=True)
                rows = ((work.rows[number], index) for number, index in several)
                best = [simulation._token(row.row, row.start + index - row.packed) for row, index in rows]
                outputs.best[torch.tensor(places, dtype=torch.long)] = torch.tensor(best, dtype=torch.long)
            device.launch(shape, sum(row.start + row.count for row in work.rows))
            return outputs, places

        def nothing(self: Any, step: Step) -> StepOutputs:
            with device.computing():
                count = step.tensors.token_ids.numel() if step.wanted is None else step.wanted.numel()
                return StepOutputs(torch.zeros(count, 1), torch.zeros(count, dtype=torch.long))

        def launching(self: Any, *args: Any) -> None:
            launched(self, *args)
            self._end = Event(device)

        def read(self: Any) -> torch.Tensor:
            self._end.synchronize()
            return logits(self)

        def placed(self: Any, scheduler: Any, starts: Any) -> None:
            start(self, scheduler, starts)
            for each in starts:
                prompt = each.row.request.token_ids
                simulation._texts[each.row.place] = prompt, simulation._answers.get(tuple(prompt), [])

        self._patch(time, "perf_counter", device.now)
        self._patch(steps.PagedSteps, "_do", simulated)
        self._patch(steps.PagedSteps, "_work", nothing)
        self._patch(steps.PagedSteps, "_token_share", TOKEN_SHARE)
        self._patch(steps.LaunchedStep, "__init__", launching)
        self._patch(steps.LaunchedStep, "logits", read)
        self._patch(Engine, "_begin", placed)
        self._patch(backend, "CHUNK", CHUNK_CUDA)

    def end(self) -> None:
        """Take the device away."""
        while self._patches:
            setattr(*self._patches.pop())

    def _patch(self, owner: Any, name: str, new: Any) -> None:
        self._patches.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, new)

    def _token(self, place: int, position: int) -> int:
        """Return what the model writes after a position of the text at a place."""
        prompt, answer = self._texts.get(place, ((), ()))
        at = position + 1 - len(prompt)
        return answer[at] if 0 <= at < len(answer) else 0


def config_of(args: argparse.Namespace, model: str, method: str, **runner_args: Any) -> Any:
    """Return the configuration of a run."""
    return ragspec.load_config(
        {
            "model": model,
            "runner": "huggingface",
            "prompt": {"source": "query"},
            "sampling": {"max_new_tokens": args.tokens, "temperature": 0.0},
            "speculation": {"method": method},
            "runner_args": runner_args,
        }
    )


def answered(args: argparse.Namespace, records: Sequence[dict[str, Any]]) -> Answers:
    """Return the demo model's answers."""
    if args.answers.exists():
        lines = args.answers.read_text().splitlines()
        return {tuple(prompt): answer for prompt, answer in map(json.loads, lines)}
    found: Answers = {}
    generate = backend.EngineBackend.generate

    def kept(self: Any, requests: Any) -> Any:
        prompts: dict[int, tuple[int, ...]] = {}

        def seen() -> Any:
            for request in requests:
                prompts[request.index] = tuple(request.token_ids)
                yield request

        for outcome in generate(self, seen()):
            assert isinstance(outcome, Generation)
            found[prompts[outcome.index]] = outcome.token_ids
            yield outcome

    backend.EngineBackend.generate = kept  # type: ignore[method-assign]
    with ragspec.Pipeline(config_of(args, args.model, "context", batch_size=16)) as pipeline:
        for _ in pipeline.answers(records):
            pass
    backend.EngineBackend.generate = generate  # type: ignore[method-assign]
    args.answers.parent.mkdir(parents=True, exist_ok=True)
    args.answers.write_text("".join(json.dumps([list(prompt), answer]) + "\n" for prompt, answer in found.items()))
    return found


def tiny(args: argparse.Namespace, folder: str) -> None:
    """Write a model of one small layer that has the demo model's tokens."""
    from transformers import AutoConfig, AutoTokenizer

    path = resolve(args.model).path
    model = build(AutoConfig.from_pretrained(path).vocab_size, 8192)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def simulate(args: argparse.Namespace, model: str, records: Any, answers: Answers, method: str, rows: int) -> None:
    """Print what one way takes."""
    simulation = Simulation(answers, args.slower)
    warm_up = backend.EngineBackend.warm_up

    def begins(self: Any, *args: Any) -> None:
        simulation.begin()
        warm_up(self, *args)

    backend.EngineBackend.warm_up = begins  # type: ignore[method-assign,assignment]
    rates, device = [], simulation.device
    try:
        config = config_of(args, model, method, batch_size=rows, attention="flex", graphs="emulate")
        with ragspec.Pipeline(config) as pipeline:
            for number in range(args.passes + 1):
                device.idle_s = device.busy_s = device.waited_s = 0.0
                device.shapes.clear()
                began = device.now()
                device.free = began
                lines = list(pipeline.answers(records))
                seconds = device.now() - began
                tokens = sum(line["output_tokens"] for line in lines)
                if number:
                    rates.append((tokens / seconds, tokens, seconds, device.busy_s, device.waited_s))
            notes = pipeline.summary.notes
    finally:
        simulation.end()
        backend.EngineBackend.warm_up = warm_up  # type: ignore[method-assign]
    rate, tokens, seconds, busy, waited = statistics.median_low(rates) if len(rates) > 1 else rates[0]
    spoken = [line.get("speculation") or {} for line in lines]
    drafted, accepted = (sum(each.get(key, 0) for each in spoken) for key in ("drafted", "accepted"))
    row_steps = sum(each.get("steps", 0) for each in spoken)
    print(
        f"{method:8s} {rows:4d} at once: {rate:,.0f} tokens/s, {seconds:.2f} s for {tokens:,} tokens; "
        f"device busy {busy:.2f} s in {device.shapes.total()} steps, host {seconds - waited:.2f} s"
        + (f"; {accepted / drafted:.0%} accepted, {tokens / row_steps:.2f} tokens a step and row" if drafted else "")
    )
    if args.steps:
        for shape, count in device.shapes.most_common():
            print(f"  {count:5d} of {shape}")
        print(*notes, sep="\n")


def main() -> None:
    """Simulate the ways that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", help="JSON lines with query and contexts")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--answers", type=Path, default=Path("out/simulated.jsonl"), help="the model's answers")
    parser.add_argument("--methods", nargs="+", default=["none", "context"])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--limit", type=int, default=10**9, help="records at most")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of an answer at most")
    parser.add_argument("--slower", type=float, default=1.0, help="how much slower the host is than this machine")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--steps", action="store_true", help="list steps by shape, and notes")
    args = parser.parse_args()
    with open(args.records, encoding="utf-8") as lines:
        records = [json.loads(line) for line, _ in zip(lines, range(args.limit), strict=False)]
    records = [{key: record[key] for key in ("id", "query", "contexts")} for record in records]
    answers = answered(args, records)
    with tempfile.TemporaryDirectory() as folder:
        tiny(args, folder)
        for rows in args.at_once:
            for method in args.methods:
                simulate(args, folder, records, answers, method, rows)
                sys.stdout.flush()


if __name__ == "__main__":
    main()
