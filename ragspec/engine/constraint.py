"""Grammars in a step: which tokens may follow at every place of every draft.

    >>> constraint.greedy(row.grammar, draft, best, logits)
    >>> constraint.masks(work).applied(logits[at:end], at)

A mask is laid on the model's logits before anything else changes them: what is minus infinity stays so. The masks of
all rows that sample, or have processors, are found in one call; a greedy row's one by one, where it needs them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ragspec.engine.profiler import Clock
from ragspec.engine.request_state import ScheduledRequest
from ragspec.structured.grammars import Matcher

FEW = 32  # words of 32 tokens that are looked at one by one


@dataclass(frozen=True, slots=True)
class Masks:
    """What a step's rows of logits may become. bits: (rows of logits, vocabulary / 32), a bit per token."""

    bits: np.ndarray
    clock: Clock

    def applied(self, logits: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return logits, (n, vocab), of the rows from `start`; tokens that may not be chosen have minus infinity."""
        started = time.perf_counter()
        masked = _laid(self.bits[start : start + len(logits)], logits)
        self.clock.masks_s += time.perf_counter() - started
        return masked


def _best(bits: np.ndarray, logits: torch.Tensor) -> int:
    """Return the best of the tokens that a mask admits. logits: (vocab,)."""
    words = np.flatnonzero(bits[0])
    if len(words) > FEW:
        return int(_laid(bits, logits[None]).argmax())
    # mostly there is one: the text is certain
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
    """Finds what the grammars of a step's rows admit. clock: counts the seconds that this takes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._executor: Any = None

    def masks(self, work: Sequence[ScheduledRequest]) -> Masks | None:
        """Return the masks of the rows of logits of `work`, for those that are not simply greedy.

        None where no such row has a grammar.
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
        """Return the best tokens that may follow, up to the first that is not the guess.

        best: of each row of the logits, (len(guesses) + 1, vocab), the best of all tokens. Where that token may follow,
        as it mostly does, asking is enough; else a mask is made, for no place behind the first wrong guess.
        """
        started = time.perf_counter()
        chosen: list[int] = []
        with closing(grammar.walk(guesses)) as places:
            for at, token, row in zip(places, best, logits, strict=False):
                if not grammar.admits(token):
                    bits = grammar.mask()
                    if not _admits(bits, token):
                        token = _best(bits, row)
                chosen.append(token)
                if at == len(guesses) or token != guesses[at]:
                    break
        self._clock.masks_s += time.perf_counter() - started
        return chosen

    def masked(self, grammar: Matcher, guesses: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return the logits, (1, vocab), of what follows `guesses`; as they are where nothing may follow these."""
        started = time.perf_counter()
        bits = grammar.mask(guesses)
        self._clock.masks_s += time.perf_counter() - started
        return logits if bits is None else Masks(bits, self._clock).applied(logits)

    def _fill(self, plain: list[Any], drafted: list[Any], bits: np.ndarray) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

        if self._executor is None:
            self._executor = LLExecutor()
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, bits)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bits)
