"""What a runner is. A new runner is one new module in this folder: its name is the `runner:` word of the config.

Such a module (or a folder's `runner` module) holds `Args`, a pydantic model of its `runner_args`, and a class `Runner`;
its methods are in speculation/methods.py. It imports nothing heavy before `check()` or `__enter__`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Self

from pydantic import BaseModel, ConfigDict

from ragspec.records import Failure, Generation, Request, Tokenizer


class Watched(Protocol):
    """What times the parts of steps while it is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def to_json(self) -> dict[str, Any]:
        """Return {phase: {steps, seconds, parts: {name: {seconds, bound_s}}}}."""


class Runner(Protocol):
    """Answers requests. A context manager: weights load on enter and are freed on exit."""

    method: str  # the speculation that runs
    remembers: bool  # whether drafts come from answers of earlier calls of generate() too
    cites: bool  # whether drafts know which passage they copy, so that requests should say where these stand

    @property
    def notes(self) -> list[str]:
        """What the user should know: fallbacks, arguments without effect."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together; None for no limit."""

    @property
    def prefill_s(self) -> float | None:
        """Seconds until first tokens, summed over batches; None if they are not known apart."""

    @property
    def decode_s(self) -> float | None:
        """Seconds after that."""

    @property
    def decode_tokens(self) -> int:
        """Tokens written in decode_s."""

    def check(self) -> None:
        """Find model and tokenizers and judge the config by them, before any weights load. Raises ConfigError."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def warm_up(self, records: int | None = None) -> None:
        """Run once what the first record would otherwise pay for.

        records: how many will come, None if nobody knows; what takes long to set up is only worth it for many.
        """

    def generate(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield one outcome per request, in any order, pulling requests only as they are needed.

        A runner that pulls ahead takes what is there (`Feed(requests).take`), and waits for more only when it has
        nothing to answer: whoever writes the input may be waiting for the answer.
        """

    def outlook(self) -> str:
        """Return which engine will answer and how, as far as can be told before weights load; needs check()."""

    def watched(self, bytes_per_s: float, flops_per_s: float) -> Watched | None:
        """Return what times the parts of steps, None where they are not known apart.

        bytes_per_s, flops_per_s: what the device reads and computes at best.
        """

    def about(self) -> dict[str, Any]:
        """Return what names this run for the stats file: versions, revision, dtype, device, batch size."""


class RunnerArgs(BaseModel):
    """The root of every runner's `runner_args` model: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    def neutral_keys(self) -> set[str]:
        """Keys that cannot change an answer, so that a resumed run may change them."""
        return set()
