"""Grammars in a step: which tokens may follow at each position of each draft.

    >>> constraint.greedy(row.grammar, draft, best, logits)
    >>> constraint.masks(work).applied(logits[at:end], range(at, end))

Masks are applied to the model's logits before anything else changes them; minus infinity stays so. Rows that sample or
have processors get their masks in one call; greedy rows one by one, and only where the best token is not allowed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ragspec.engine.model.result import NOT_A_NUMBER
from ragspec.engine.profiler import Clock
from ragspec.engine.request_state import ScheduledRequest
from ragspec.structured.grammars import Matcher

FEW = 32  # mask words (of 32 tokens) up to which tokens are checked one by one


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of a step's rows of logits. bits: (rows of logits, vocabulary / 32) int32, a bit per token."""

    bits: np.ndarray
    clock: Clock

    def applied(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return logits, (n, vocab), of the given rows, with minus infinity for tokens that are not allowed."""
        started = time.perf_counter()
        masked = _laid(self.bits[list(rows)], logits)
        self.clock.masks_s += time.perf_counter() - started
        return masked


def _best(bits: np.ndarray, logits: torch.Tensor) -> int:
    """Return the best token that a mask allows. logits: (vocab,)."""
    words = np.flatnonzero(bits[0])
    if len(words) > FEW:
        return int(_laid(bits, logits[None]).argmax())
    # mostly one token is left: the text is forced
    tokens = [token for word in words.tolist() for token in range(32 * word, 32 * word + 32) if _admits(bits, token)]
    return tokens[0] if len(tokens) == 1 else tokens[int(logits[tokens].argmax())]


def _admits(bits: np.ndarray, token: int) -> bool:
    return bool(bits[0, token >> 5] >> (token & 31) & 1)


def _laid(bits: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    """Return the logits, (n, vocab), with minus infinity where a bit is 0."""
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    mask = torch.from_numpy(allowed[:, : logits.shape[1]].view(np.bool_)).to(logits.device)
    return torch.where(mask, logits, float("-inf"))


class Constraint:
    """Applies the grammars of a step's rows. clock: counts the seconds that this takes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._executor: Any = None

    def masks(self, work: Sequence[ScheduledRequest]) -> Masks | None:
        """Return masks for the logits of `work`, filled for rows that are not greedy; None if none has a grammar.

        The rows of the masks are those of the logits that `work` wants, in its order.
        """
        started = time.perf_counter()
        plain: list[Any] = []
        drafted: list[Any] = []
        at = width = 0
        for item in work:
            grammar = item.row.grammar
            if grammar is not None and item.writes and not item.row.greedy:
                guesses = grammar.before_end(item.draft.token_ids)
                (drafted if guesses else plain).append((grammar.inner, at, *([guesses] if guesses else [])))
                width = grammar.width
            at += item.wanted
        if not width:
            return None
        bits = np.full((at, -(-width // 32)), -1, np.int32)
        self._fill(plain, drafted, bits)
        self._clock.masks_s += time.perf_counter() - started
        return Masks(bits, self._clock)

    def greedy(self, grammar: Matcher, guesses: Sequence[int], best: Sequence[int], logits: torch.Tensor) -> list[int]:
        """Return the best allowed tokens, up to the first that differs from the guess.

        best: the argmax of each row of the logits, (len(guesses) + 1, vocab). If the grammar allows it, as it mostly
        does, no mask is needed; otherwise a mask is made, but for no position after the first wrong guess. Nothing is
        allowed or not after logits that are not numbers.
        """
        started = time.perf_counter()
        chosen: list[int] = []
        with closing(grammar.walk(guesses)) as places:
            for at, token, row in zip(places, best, logits, strict=False):
                if token != NOT_A_NUMBER and not grammar.admits(token):
                    bits = grammar.mask()
                    if not _admits(bits, token):
                        token = _best(bits, row)
                chosen.append(token)
                if at == len(guesses) or token != guesses[at]:
                    break
        self._clock.masks_s += time.perf_counter() - started
        return chosen

    def masked(self, grammar: Matcher, guesses: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return the masked logits, (1, vocab), after `guesses`; unmasked if the grammar allows nothing there."""
        started = time.perf_counter()
        bits = grammar.mask(guesses)
        self._clock.masks_s += time.perf_counter() - started
        return logits if bits is None else Masks(bits, self._clock).applied(logits, [0])

    def _fill(self, plain: list[Any], drafted: list[Any], bits: np.ndarray) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

        if self._executor is None:
            self._executor = LLExecutor()
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, bits)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bits)
