"""Grammars in a step: which tokens may follow at every place of every draft.

    >>> constraint.greedy(row.grammar, draft, best, logits)
    >>> constraint.masks(work).applied(logits[at:end], at)

A mask is laid on the model's logits before anything else changes them: what is minus infinity stays so. The masks of
all rows that sample, or have processors, are found in one call. Greedy rows need none where the best token is admitted.
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

    def applied(self, logits: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return logits, (n, vocab), of the rows from `start`; tokens that may not be chosen have minus infinity."""
        started = time.perf_counter()
        bits = self.bits[start : start + len(logits)]
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
        mask = torch.from_numpy(allowed[:, : logits.shape[1]].view(np.bool_)).to(logits.device)
        masked = torch.where(mask, logits, float("-inf"))
        self.clock.masks_s += time.perf_counter() - started
        return masked


class Constraint:
    """Finds what the grammars of a step's rows admit. clock: counts the seconds that this takes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._executor: Any = None

    def masks(self, work: Sequence[Work]) -> Masks | None:
        """Return the masks of the rows of logits of `work`, for those that are not simply greedy.

        None where no such row has a grammar.
        """
        shaped = [item.row.grammar for item in work if item.row.grammar and item.writes and not item.row.greedy]
        if not shaped:
            return None
        started = time.perf_counter()
        plain: list[Any] = []
        drafted: list[Any] = []
        at = 0
        for item in work:
            grammar = item.row.grammar
            if grammar is not None and item.writes and not item.row.greedy:
                guesses = grammar.before_end(item.draft.token_ids)
                (drafted if guesses else plain).append((grammar.inner, at, *([guesses] if guesses else [])))
            at += item.wanted
        bits = np.full((at, -(-shaped[0].width // 32)), -1, np.int32)
        self._fill(plain, drafted, bits)
        self._clock.masks_s += time.perf_counter() - started
        return Masks(bits, self._clock)

    def greedy(self, grammar: Matcher, guesses: Sequence[int], best: Sequence[int], logits: torch.Tensor) -> list[int]:
        """Return the best tokens that may follow, up to the first that is not the guess.

        guesses: admitted ones. best: of each row of the logits, (len(guesses) + 1, vocab), the best of all tokens.
        Most are admitted, which is asked at once; a mask is made only for a place where the best one is not.
        """
        chosen: list[int] = []
        for token, row in zip(best, logits, strict=True):
            at = len(chosen)
            guess = guesses[at] if at < len(guesses) else None
            if token != guess and not self._admits(grammar, [*guesses[:at], token]):
                token = int(self.masked(grammar, guesses[:at], row[None]).argmax())
            chosen.append(token)
            if token != guess:
                break
        return chosen

    def masked(self, grammar: Matcher, guesses: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return the logits, (1, vocab), of what follows `guesses`; as they are where nothing may follow these."""
        started = time.perf_counter()
        bits = grammar.mask(guesses)
        self._clock.masks_s += time.perf_counter() - started
        return logits if bits is None else Masks(bits, self._clock).applied(logits)

    def _admits(self, grammar: Matcher, tokens: Sequence[int]) -> bool:
        started = time.perf_counter()
        admits = grammar.admitted(tokens) == len(tokens)
        self._clock.masks_s += time.perf_counter() - started
        return admits

    def _fill(self, plain: list[Any], drafted: list[Any], bits: np.ndarray) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

        if self._executor is None:
            self._executor = LLExecutor()
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, bits)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bits)
