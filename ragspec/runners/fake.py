"""A runner without a model, to test the pipeline and try a config: it repeats the end of the prompt.

    runner: fake
    runner_args: {fail_ids: [q7], delay_s: 0.01}

Its tokens are bytes and its speculation is a fixed pattern, so its numbers say nothing about models.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from ragspec.config.run import RunConfig
from ragspec.inputs.feed import Feed
from ragspec.records import Failure, Generation, Request, Spans, TokenLogprob
from ragspec.runners.base import RunnerArgs
from ragspec.speculation.methods import PLAIN
from ragspec.stats import SpecStats

BATCH_SIZE = 8


class Args(RunnerArgs):
    """`runner_args` of the fake runner."""

    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Records at a time."""
    context_length: Annotated[int, Field(ge=2)] | None = None
    """Maximum bytes of prompt plus answer."""
    delay_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds per batch."""
    fail_ids: list[str] = []
    """Ids of records that fail inside generation."""
    exit_ids: list[str] = []
    """Ids of records that end the whole process."""
    reverse: bool = False
    """Finish each batch last record first."""

    def neutral_keys(self) -> set[str]:
        return {"batch_size", "delay_s", "reverse"}


class ByteTokenizer:
    """Every byte is a token; the vocabulary cannot grow."""

    has_chat_template = False
    thinking = None
    ends: frozenset[int] = frozenset()
    controls = None
    size = 256
    width = 256
    bos = None

    def encode(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[int]:
        return list(text.encode())

    def control_ids(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[int]:
        return []

    def control_spans(self, text: str, *, special_tokens: bool) -> Spans | None:
        return None

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def offsets(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[tuple[int, int]] | None:
        return None

    def piece(self, token_id: int) -> str:
        return self.decode([token_id])

    def piece_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def render_chat(self, messages: list[dict[str, Any]], **args: Any) -> str:
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


class Runner:
    """Answers with the last `max_new_tokens` bytes of the prompt."""

    def __init__(self, config: RunConfig) -> None:
        args = config.args()
        assert isinstance(args, Args)
        self._args = args
        self._batch_size = BATCH_SIZE if args.batch_size == "auto" else args.batch_size
        self._fail_ids = set(args.fail_ids)
        self.tokenizer = ByteTokenizer()
        self.context_length = args.context_length
        self.method = config.speculation.method
        self.remembers = False
        self.cites = False
        self.notes: list[str] = []
        self.prefill_s: float | None = None
        self.peak_elsewhere = (0, 0)
        self.decode_s: float | None = None
        self.decode_tokens = 0

    def check(self) -> None:
        """Do nothing: there is no model to find."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def warm_up(self, records: int | None = None) -> None:
        """Do nothing."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield batch by batch, each in input order or, with `reverse`, in reverse."""
        source = Feed(requests)
        while batch := source.take(self._batch_size, wait=True):
            if self._args.delay_s:
                time.sleep(self._args.delay_s)
            for request in reversed(batch) if self._args.reverse else batch:
                yield self._answer(request)

    def _answer(self, request: Request) -> Generation | Failure:
        if request.id in self._args.exit_ids:
            os._exit(1)
        if request.id in self._fail_ids:
            return Failure(request.index, "the fake runner is configured to fail here")
        token_ids = request.token_ids[-request.sampling.max_new_tokens :]
        if self.method == PLAIN:
            return self._generation(request, token_ids, SpecStats(steps=len(token_ids)))
        spec = SpecStats()
        left = len(token_ids)
        while left > 0:
            drafted = min(3, left - 1)
            spec.record(drafted, drafted)
            left -= drafted + 1
        return self._generation(request, token_ids, spec)

    def _generation(self, request: Request, token_ids: list[int], spec: SpecStats) -> Generation:
        most = request.sampling.logprobs
        certain = () if most is None else tuple(TokenLogprob(0.0, ((token, 0.0),)[:most]) for token in token_ids)
        latency_s = self._args.delay_s
        return Generation(request.index, token_ids, "length", spec, latency_s=latency_s, logprobs=certain)

    def outlook(self) -> str:
        """Return that no model will answer."""
        return "the fake runner will answer: no model, for tests of the pipeline"

    def watched(self, bytes_per_s: float, flops_per_s: float) -> None:
        """Return None: there is nothing to profile."""

    def about(self) -> dict[str, Any]:
        """Return the batch size; there is no model to describe."""
        return {"model": "none", "batch_size": self._batch_size}
