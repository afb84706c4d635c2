"""What a grammar forces, as a draft: keys of an object, separators, the rest of a word once its beginning is clear.

The text is certain, how the model divides it into tokens is not: the chance that it divides it as llguidance does is
learnt in the run. A token boundary is never chosen by a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.engine.row import Row
from ragspec.speculation.drafters.base import Draft

LEARN = 0.02
FIRST_GUESS = 0.8


class Forced:
    """Adds forced tokens to drafts. met, right: how many the target came to, and how many of them it wrote so."""

    def __init__(self) -> None:
        self.met = 0
        self.right = 0
        self._chance = FIRST_GUESS
        self._pending: dict[int, tuple[int, list[int]]] = {}  # by place: where in the draft, and which tokens

    def join(self, row: Row, draft: Draft, limit: int) -> Draft:
        """Return a draft of `limit` tokens at most: what is forced now, or `draft` as far as it is admitted and on."""
        assert row.grammar is not None
        if draft.probabilities is not None:
            return row.admitted(draft)
        draft = draft.cut(row.grammar.admitted(draft.token_ids))
        now = row.grammar.forced()
        if now and draft.token_ids[: len(now)] != now:
            draft = Draft()
        forced = now if not draft.token_ids else row.grammar.forced(draft.token_ids)
        start = len(draft.token_ids)
        forced = forced[: max(0, limit - start)]
        if not forced:
            self._pending.pop(row.place, None)
            return draft.cut(limit)
        self._pending[row.place] = start, forced
        chance = draft.survival[-1] if draft.survival else 1.0
        survival = [chance * self._chance ** (i + 1) for i in range(len(forced))]
        return Draft(draft.token_ids + forced, draft.survival + survival, draft.sources + [None] * len(forced))

    def score(self, row: Row, written: Sequence[int]) -> None:
        """Learn from what the target wrote, whether the draft was verified or not."""
        start, forced = self._pending.pop(row.place, (0, []))
        for guess, token in zip(forced, written[start:], strict=False):
            self.met += 1
            self.right += guess == token
            self._chance += LEARN * ((guess == token) - self._chance)
            if guess != token:
                break
