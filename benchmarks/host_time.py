"""What a step over the paged cache takes on the host: everything but the model, as a GPU would compute it, and drafts.

    python benchmarks/host_time.py --rows 1 16 64 256 [--drafts 3] [--sampling '{"repetition_penalty": 1.1}']

A tiny random model decodes with captured steps, which compute nothing: what they would is the device's time, and would
take the host's caches from it here. Prints the median of the steps in which all rows decode, and the 10th
percentile, which depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from ragspec.engine.backends.graphs import StepOutputs, Work
from ragspec.engine.backends.paged_attention import gathered
from ragspec.engine.engine import CHUNK_CUDA, Engine, EngineSettings
from ragspec.engine.kv.paged_cache import PagedCache
from ragspec.engine.model.forward import Model
from ragspec.engine.model.result import StepResult
from ragspec.engine.proposers.base import NoProposer
from ragspec.engine.request_state import RequestState
from ragspec.models.logits_processors import GenerationRules
from ragspec.records import Generation, Request, Sampling
from ragspec.speculation.drafters.base import Draft

VOCABULARY = 512


class IdleCapture:
    """Captures steps that compute nothing when they are replayed, as if the device were infinitely fast.

    seconds: spent in captures.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, work: Work) -> tuple[Callable[[], None], StepOutputs]:
        """Return what replays nothing, and the outputs of running the work once."""
        started = time.perf_counter()
        outputs = work()
        self.seconds += time.perf_counter() - started
        return lambda: None, outputs


class Repeats(NoProposer):
    """Drafts the last token again, which is what idle steps answer, `tokens` times.

    seconds: spent in doing so.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.seconds = 0.0

    def propose(self, rows: Sequence[RequestState], prefill_tokens: int) -> list[Draft]:
        """Return a draft for each row."""
        started = time.perf_counter()
        drafts = [Draft(row.tokens[-1:] * min(self._tokens, row.room - 1)) for row in rows]
        self.seconds += time.perf_counter() - started
        return drafts


def build(vocabulary: int = VOCABULARY, context: int = 4096) -> Any:
    """Return a Llama of one layer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=context,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def steps(rows: int, prompt: int, sampling: Sampling, drafts: int = 0) -> Iterator[float]:
    """Yield the host's seconds of each step in which `rows` rows decode, or verify `drafts` tokens each."""
    capture = IdleCapture()
    model = Model(build(), rows, None, gathered, capture)
    assert isinstance(model.cache, PagedCache)
    model.cache.allocate(1 + rows * -(-(prompt + sampling.max_new_tokens) // model.cache.size))
    model.cache.fixed = True  # as on a GPU, so that each step asks whether there are blocks for it
    rules = GenerationRules(model.inner, frozenset(), 0)
    settings = EngineSettings(chunk=CHUNK_CUDA, processors=lambda each: rules.processors(each.sampling, prompt))
    repeats = Repeats(drafts)
    engine = Engine(model, repeats if drafts else NoProposer(), None, frozenset(), settings)  # type: ignore[arg-type]
    requests = (Request(i, str(i), [(i + j) % VOCABULARY for j in range(prompt)], sampling) for i in range(rows))
    marks: list[tuple[float, float, int]] = []

    def timed(begin: Callable[..., StepResult]) -> Callable[..., StepResult]:
        def begun(segments: Any, *args: Any, **kwargs: Any) -> StepResult:
            decoding = sum(not segment.alone for segment in segments)
            marks.append((time.perf_counter(), capture.seconds + repeats.seconds, decoding))
            return begin(segments, *args, **kwargs)

        return begun

    model.begin = timed(model.begin)  # type: ignore[method-assign]
    model.begin_after = timed(model.begin_after)  # type: ignore[method-assign]
    assert sum(isinstance(outcome, Generation) for outcome in engine.run(requests)) == rows
    for (start, before, decoding), (end, after, _) in pairwise(marks):
        if decoding == rows:
            yield end - start - (after - before)


def main() -> None:
    """Print a line per number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--prompt", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=320, help="tokens of an answer")
    parser.add_argument("--drafts", type=int, default=0, metavar="N", help="verify N tokens a row, all accepted")
    parser.add_argument("--sampling", type=json.loads, default={}, help="keys of a config's `sampling`, as JSON")
    parser.add_argument("--profile", action="store_true", help="show where the time of the last run goes")
    args = parser.parse_args()
    sampling = Sampling(max_new_tokens=args.tokens * (1 + args.drafts), **args.sampling)
    for rows in args.rows:
        seconds = list(steps(rows, args.prompt, sampling, args.drafts))
        if len(seconds) < 2:
            sys.exit(f"{rows} rows: the first answers end before the last prompts are read; give more --tokens")
        tenth, middle = (1e3 * statistics.quantiles(seconds, n=10)[at] for at in (0, 4))
        print(f"{rows:4d} rows: {middle:.2f} ms a step on the host (10th percentile {tenth:.2f}), {len(seconds)} steps")
    if args.profile:
        with cProfile.Profile() as profile:
            list(steps(args.rows[-1], args.prompt, sampling, args.drafts))
        profile.print_stats("tottime")


if __name__ == "__main__":
    main()
