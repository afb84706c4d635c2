"""What a step gives: asked for when it starts, read when the device has computed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

NOT_A_NUMBER = -1  # stands for the token after logits that are not numbers


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the most likely tokens, (n,), of logits, (n, vocab); NOT_A_NUMBER where one of these is NaN."""
    best = logits.argmax(-1)  # of a NaN, if there is one
    return best.masked_fill(logits.gather(-1, best[:, None])[:, 0].isnan(), NOT_A_NUMBER)


class StepResult(Protocol):
    """The result of a step, at its wanted tokens. Errors of the computation are raised by whichever reads it."""

    def done(self) -> bool:
        """Return whether it can be read without waiting."""

    def best(self) -> list[int]:
        """Return the most likely token after each; NOT_A_NUMBER after logits that are not numbers."""

    def written(self) -> tuple[torch.Tensor, list[int]] | None:
        """Return best tokens on the device, and the index there of each wanted one's; None if there is no such tensor.

        Does not wait for the device.
        """

    def logits(self) -> torch.Tensor:
        """Return the logits, (wanted, vocab) in float32. Only if they were asked for."""


class Deferred:
    """A result that is computed once it is read, where nothing runs beside the host."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute = compute
        self._logits: torch.Tensor | None = None

    def done(self) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def written(self) -> None:
        """Return None: the next step has nothing to start from."""

    def best(self) -> list[int]:
        """Return the most likely token after each."""
        found: list[int] = best_tokens(self.logits()).tolist()
        return found

    def logits(self) -> torch.Tensor:
        """Return the logits, (wanted, vocab) in float32."""
        if self._logits is None:
            self._logits = self._compute()
        return self._logits
