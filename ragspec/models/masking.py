"""Grammars as a logits processor of transformers: what stock generate() and the audit hold answers to.

    >>> GrammarMasks([grammars.matcher(text)], prompt_tokens=12)(input_ids, scores)

Where an answer is in its grammar follows from its tokens alone, so assisted generation, which asks about drafts and
then goes back, gets the right masks too. Limit: prompts of one width, as in a padded batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ragspec.structured.grammars import Matcher


class Follower:
    """One answer's grammar, moved to wherever its tokens say."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._taken: list[int] = []

    def mask(self, answer: Sequence[int]) -> torch.Tensor | None:
        """Return which tokens may follow `answer`, (vocabulary,) of bool; None where the grammar refuses the answer."""
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        inner, wanted = self._matcher.inner, self._matcher.before_end(answer)
        pairs = zip(self._taken, wanted, strict=False)
        same = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(self._taken), len(wanted)))
        if same < len(self._taken):
            inner.rollback(len(self._taken) - same)
            del self._taken[same:]
        rest = wanted[same:]
        if inner.validate_tokens(rest) < len(rest):
            return None
        inner.consume_tokens(rest)
        self._taken += rest
        mask = allocate_token_bitmask(1, self._matcher.width)
        fill_next_token_bitmask(inner, mask)
        return torch.from_numpy(np.unpackbits(mask[0].view(np.uint8), bitorder="little").astype(bool))

    def masked(self, logits: torch.Tensor, answer: Sequence[int]) -> torch.Tensor:
        """Return the logits, (vocab,), with minus infinity for what may not follow `answer`."""
        mask = self.mask(answer)
        return logits if mask is None else logits.masked_fill(~mask[: len(logits)].to(logits.device), float("-inf"))

    def copy(self) -> Follower:
        """Return another that stands where this one does."""
        copied = Follower(self._matcher.copy())
        copied._taken = list(self._taken)
        return copied


class GrammarMasks:
    """The processor of a batch. matchers: of its rows, None for one that may write anything."""

    def __init__(self, matchers: Sequence[Matcher | None], prompt_tokens: int) -> None:
        self._rows = [None if matcher is None else Follower(matcher) for matcher in matchers]
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, (rows, vocab), after `input_ids`, (rows, tokens); a beam's rows are neighbours."""
        answers = input_ids[:, self._prompt_tokens :].tolist()
        beams = max(1, len(answers) // len(self._rows))
        rows = [self._rows[at // beams] for at in range(len(answers))]
        masked = [
            own if row is None else row.masked(own, answer)
            for row, own, answer in zip(rows, scores, answers, strict=True)
        ]
        return torch.stack(masked)

    def __deepcopy__(self, memo: Any) -> GrammarMasks:
        """A draft model gets processors of its own."""
        copied = GrammarMasks([], self._prompt_tokens)
        copied._rows = [None if row is None else row.copy() for row in self._rows]
        return copied
