"""The runner protocol. A new runner is one new module in this folder, named as the `runner:` word of the config.

The module (or the folder's `runner` module) provides `Args`, a pydantic model of its `runner_args`, and a class
`Runner`. Its speculation methods are listed in speculation/methods.py. It imports nothing heavy before `check()` or
`__enter__`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Self

from pydantic import BaseModel, ConfigDict

from ragspec.records import Failure, Generation, Request, Tokenizer


class Watched(Protocol):
    """A context manager that profiles steps while it is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def to_json(self) -> dict[str, Any]:
        """Return {phase: {steps, seconds, parts: {name: {seconds, bound_s}}}}."""


class Runner(Protocol):
    """Answers requests. A context manager: weights load on enter and are freed on exit."""

    method: str  # the speculation method in use
    remembers: bool  # whether drafts also come from answers of earlier generate() calls
    cites: bool  # whether drafts know the passage they copy from, so that requests need passage positions

    @property
    def notes(self) -> list[str]:
        """Notes for the user: fallbacks, arguments without effect."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The target model's tokenizer."""

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and answer together; None for no limit."""

    @property
    def prefill_s(self) -> float | None:
        """Seconds to first tokens, summed over batches; None if prefill is not timed separately."""

    @property
    def decode_s(self) -> float | None:
        """Seconds after the first tokens, None as for prefill_s."""

    @property
    def decode_tokens(self) -> int:
        """Tokens generated in decode_s."""

    @property
    def peak_elsewhere(self) -> tuple[int, int]:
        """Peak bytes of processes that the runner has started: resident, and on GPUs."""

    def check(self) -> None:
        """Find the model and tokenizers and check the config against them, without weights. Raises ConfigError."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def warm_up(self, records: int | None = None) -> None:
        """Run once what the first record would otherwise pay for.

        records: expected number of records, None if unknown; slow set-up only pays off for many.
        """

    def generate(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield one outcome per request, in any order, pulling requests only as they are needed.

        A runner that reads ahead takes what has arrived (`Feed(requests).take`). It waits for more only when it has
        nothing to answer, since the writer of the input may be waiting for an answer.
        """

    def outlook(self) -> str:
        """Return which engine will answer and how, as far as is known before weights load; call check() first."""

    def watched(self, bytes_per_s: float, flops_per_s: float) -> Watched | None:
        """Return a profiler of the engine's steps, None if the runner has none.

        bytes_per_s, flops_per_s: the device's peak memory bandwidth and compute.
        """

    def about(self) -> dict[str, Any]:
        """Return what identifies the runner in the stats file: versions, revision, dtype, device, batch size."""


class RunnerArgs(BaseModel):
    """The base of every runner's `runner_args` model; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    def neutral_keys(self) -> set[str]:
        """Return the keys that cannot change an answer, so that a resumed run may change them."""
        return set()
