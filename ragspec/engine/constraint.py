"""Grammars in a step: which tokens may follow at every place of every draft, found in one call for all rows.

    >>> masks = Constraint(clock).masks(work)
    >>> masks.admits(row, token); masks.applied(logits[rows], rows)

A mask is laid on the model's logits before anything else changes them: what is minus infinity stays so. Where nothing
else does, the best token is looked up in the mask first, and most rows need no more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ragspec.engine.clock import Clock
from ragspec.engine.work import Work
from ragspec.structured.grammars import Matcher


@dataclass(frozen=True, slots=True)
class Masks:
    """What a step's rows of logits may become. bits: (rows of logits, vocabulary / 32), a bit per token."""

    bits: np.ndarray
    clock: Clock

    def admits(self, row: int, token: int) -> bool:
        """Return whether a token may be chosen from a row of the logits."""
        return bool(self.bits[row, token >> 5] >> (token & 31) & 1)

    def applied(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the logits, (n, vocab), of these n rows; tokens that may not be chosen have minus infinity."""
        started = time.perf_counter()
        allowed = np.unpackbits(self.bits[list(rows)].view(np.uint8), axis=1, bitorder="little")
        mask = torch.from_numpy(allowed[:, : logits.shape[1]]).to(logits.device, torch.bool)
        masked = torch.where(mask, logits, float("-inf"))
        self.clock.masks_s += time.perf_counter() - started
        return masked


class Constraint:
    """Finds the masks of steps. clock: counts the seconds that this takes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._executor: Any = None

    def masks(self, work: Sequence[Work]) -> Masks | None:
        """Return the masks of all rows of logits that are wanted of `work`; None where no row has a grammar."""
        if not any(item.row.grammar for item in work):
            return None
        started = time.perf_counter()
        plain: list[Any] = []
        drafted: list[Any] = []
        at = 0
        for item in work:
            grammar = item.row.grammar
            if grammar is not None and item.writes:
                guesses = grammar.before_end(item.draft.token_ids)
                (drafted if guesses else plain).append((grammar.inner, at, *([guesses] if guesses else [])))
                width = grammar.width
            at += item.wanted
        bits = np.full((at, -(-width // 32)), -1, np.int32) if plain or drafted else None
        if bits is not None:
            self._fill(plain, drafted, bits)
        self._clock.masks_s += time.perf_counter() - started
        return None if bits is None else Masks(bits, self._clock)

    def masked(self, grammar: Matcher, guesses: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return the logits, (1, vocab), of what follows `guesses`; as they are where nothing may follow these."""
        if grammar.admitted(guesses) < len(guesses) or len(grammar.before_end(guesses)) < len(guesses):
            return logits
        bits = np.full((1 + len(guesses), -(-grammar.width // 32)), -1, np.int32)
        one = [(grammar.inner, 0, *([list(guesses)] if guesses else []))]
        self._fill(*(([], one) if guesses else (one, [])), bits)
        return Masks(bits, self._clock).applied(logits, [len(guesses)])

    def _fill(self, plain: list[Any], drafted: list[Any], bits: np.ndarray) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

        if self._executor is None:
            self._executor = LLExecutor()
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, bits)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bits)
