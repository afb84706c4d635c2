"""What one row does in a step, and what the target makes of it: the items of plan, forward, accept and commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ragspec.engine.layout import Segment
from ragspec.engine.row import Row
from ragspec.engine.sampling import draw
from ragspec.engine.verify import agreement, reject
from ragspec.models.logprobs import token_logprobs
from ragspec.records import TokenLogprob
from ragspec.speculation.drafters.base import Draft

if TYPE_CHECKING:
    from ragspec.engine.constraint import Constraint


@dataclass(slots=True)
class Work:
    """What one row does in a step: its last token and a draft behind it (decodes), or a piece of its text.

    writes: whether the last of `token_ids` is the row's last, so that a token follows. logprobs: of what the target
    wrote, where the record asks for them.
    """

    row: Row
    token_ids: list[int]
    draft: Draft = field(default_factory=Draft)
    decodes: bool = False
    writes: bool = True
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        """Of how many of its last tokens logits are wanted."""
        return 1 + len(self.draft.token_ids) if self.writes else 0

    @property
    def segment(self) -> Segment:
        """Where its tokens go."""
        row = self.row
        return Segment(row.place, row.computed, len(self.token_ids), alone=not self.decodes, base=row.base)

    @property
    def slots(self) -> int:
        """How many slots its row needs for it."""
        return self.row.computed + len(self.token_ids)


Written = list[tuple[Work, list[int]]]  # each row's work and the tokens that the target wrote


def accept(work: Sequence[Work], logits: torch.Tensor, constraint: Constraint) -> Written:
    """Return what the target writes after each row's tokens, up to its first disagreement with the draft.

    logits: (sum of what is wanted, vocab), row after row. constraint: knows what grammars admit.
    """
    masks = constraint.masks(work)
    greedy = any(item.writes and item.row.greedy for item in work)
    best: list[int] = logits.argmax(-1).tolist() if greedy else []
    written: Written = []
    at = 0
    for item in work:
        end = at + item.wanted
        row, guesses = item.row, item.draft.token_ids
        if not item.writes:
            chosen = []
        elif not row.greedy:
            chosen = _choose(item, logits[at:end] if masks is None else masks.applied(logits[at:end], at))
        elif row.grammar is not None:
            chosen = constraint.greedy(row.grammar, guesses, best[at:end], logits[at:end])
        else:
            chosen = best[at : at + agreement(guesses, best[at:end]) + 1]
        most = row.request.sampling.logprobs
        if item.writes and most is not None:
            item.logprobs = token_logprobs(logits[at:end], chosen, most)
        written.append((item, chosen))
        at = end
    return written


def _choose(item: Work, logits: torch.Tensor) -> list[int]:
    """Return what one row writes, by its own processors, and its own noise where it samples."""
    row, guesses = item.row, item.draft.token_ids
    if row.processors is not None:
        logits = row.processors(logits, row.tokens, guesses)
    if not row.samples:
        chosen = logits.argmax(-1).tolist()
    else:
        weights = torch.softmax(logits.double(), dim=-1)
        if item.draft.probabilities is not None:
            return reject(weights, item.draft.probabilities, guesses, row.noise, row.written)
        chosen = draw(weights, [row.noise.at(row.written + i) for i in range(len(guesses) + 1)])
    return chosen[: agreement(guesses, chosen) + 1]
