"""Which steps a run asks a GPU for, and what they would take by the step times measured on one.

    python benchmarks/gpu_schedule.py --requests 910 --at-once 64 [--prompt 500] [--answer 96] [--shapes]

The engine answers requests of random lengths without drafts, with emulated steps of a tiny model, and the steps that it
starts are counted. Their times are those of a Llama of 8B in bfloat16 on an H100 (`benchmarks/gpu_steps.py`); a step
that is not started ahead waits for the host. So ways to cut steps can be compared without a GPU, not engines.
"""

from __future__ import annotations

import argparse
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from host_time import VOCABULARY, build

from ragspec.engine.backends.graphs import emulated
from ragspec.engine.backends.paged_attention import gathered
from ragspec.engine.backends.step_shapes import StepShape
from ragspec.engine.engine import CHUNK_CUDA, Engine, EngineSettings
from ragspec.engine.model.forward import Model
from ragspec.engine.proposers.base import NoProposer
from ragspec.records import Generation, Request, Sampling

LINEAR_MS = {1: 6.3, 16: 6.6, 64: 7.0, 256: 9.2, 512: 13.0, 1024: 22.0, 2048: 41.0}  # but for attention, by tokens
READ_MS = 1e-3 * 131072 / 2.7e6  # a cached token, at the memory's speed
HOST_MS = 0.5  # between a result and the launch of a step that is not started ahead
TOKEN_SHARE = 131072 / 14.9e9  # of an 8B's weights, where steps are cut by it


def linear_ms(tokens: int) -> float:
    """Return what everything but attention takes for so many tokens."""
    sizes = list(LINEAR_MS)
    upper = sizes[min(max(1, bisect_left(sizes, tokens)), len(sizes) - 1)]
    lower = sizes[sizes.index(upper) - 1]
    slope = (LINEAR_MS[upper] - LINEAR_MS[lower]) / (upper - lower)
    return LINEAR_MS[lower] + slope * (tokens - lower)


def requests_of(number: int, prompt: int, answer: int, most: int) -> Iterator[Request]:
    """Yield requests of random lengths."""
    random_ = random.Random(7)
    for i in range(number):
        tokens = [random_.randrange(VOCABULARY) for _ in range(max(8, int(random_.gauss(prompt, prompt / 4))))]
        length = min(most, max(1, int(random_.gauss(answer, answer / 3))))
        yield Request(i, str(i), tokens, Sampling(max_new_tokens=length))


class Counted:
    """Counts the steps of a model. ms: what they would take. shapes: how many there were of each."""

    def __init__(self, model: Model) -> None:
        self.ms = 0.0
        self.shapes: Counter[StepShape] = Counter()
        assert model.steps is not None
        self._ahead = False  # whether the device has something to do
        shapes = model.steps.shapes
        shapes.cut = self._cuts(shapes.cut)  # type: ignore[method-assign]
        model.begin = self._begins(model.begin, ahead=False)  # type: ignore[method-assign]
        model.begin_after = self._begins(model.begin_after, ahead=True)  # type: ignore[method-assign]

    def _cuts(self, cut: Callable[..., Any]) -> Callable[..., Any]:
        def counted(segments: Any, width: int, token_share: float, *args: Any, **options: Any) -> Any:
            for rows, shape in cut(segments, width, TOKEN_SHARE, *args, **options):
                self.shapes[shape] += 1
                read = sum(row.start + row.count for row in rows)
                self.ms += linear_ms(shape.size) + READ_MS * read
                yield rows, shape

        return counted

    def _begins(self, begin: Callable[..., Any], ahead: bool) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.ms += 0.0 if self._ahead or ahead else HOST_MS
            self._ahead = ahead
            return begin(*args, **options)

        return counted


def main() -> None:
    """Print the steps, and what they would take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=91)
    parser.add_argument("--at-once", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--prompt", type=int, default=500, help="mean tokens of a prompt")
    parser.add_argument("--answer", type=int, default=96, help="mean tokens of an answer")
    parser.add_argument("--most", type=int, default=128, help="tokens of an answer at most")
    parser.add_argument("--shapes", action="store_true", help="list the steps by shape")
    args = parser.parse_args()
    for rows in args.at_once:
        model = Model(build(), rows, None, gathered, emulated)
        counted = Counted(model)
        settings = EngineSettings(chunk=CHUNK_CUDA)
        engine = Engine(model, NoProposer(), None, frozenset(), settings)  # type: ignore[arg-type]
        asked = requests_of(args.requests, args.prompt, args.answer, args.most)
        outcomes = list(engine.run(asked))
        tokens = sum(len(outcome.token_ids) for outcome in outcomes if isinstance(outcome, Generation))
        print(
            f"{rows:4d} at once: {counted.ms / 1e3:.2f} s, {1e3 * tokens / counted.ms:,.0f} tokens/s; "
            f"{counted.shapes.total()} steps, {tokens:,} tokens written"
        )
        if args.shapes:
            for shape, count in counted.shapes.most_common():
                print(f"  {count:5d} of {shape}")


if __name__ == "__main__":
    main()
