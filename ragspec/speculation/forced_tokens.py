"""Draft what a grammar forces: keys of an object, separators, the rest of a word once its beginning is clear.

The text is certain, its tokenization is not: the probability that the model splits it as llguidance does is learnt
during the run. A draft never decides a token boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.speculation.drafters.base import Draft
from ragspec.structured.grammars import Matcher

LEARN = 0.02
FIRST_GUESS = 0.8


class ForcedTokens:
    """Adds forced tokens to drafts. end: include the token that ends an answer.

    met, right: forced tokens that the target reached, and those of them that it wrote.
    """

    def __init__(self, *, end: bool = True) -> None:
        self._end = end
        self.met = 0
        self.right = 0
        self._chance = FIRST_GUESS
        self._pending: dict[int, tuple[int, list[int]]] = {}  # row -> position in the draft, forced tokens

    def join(self, row: int, matcher: Matcher, draft: Draft, limit: int) -> Draft:
        """Return a draft of at most `limit` tokens: the allowed part of `draft`, with forced tokens before or after it.

        row: any number that identifies the row.
        """
        if draft.probabilities is not None:
            return admitted(matcher, draft)
        draft = draft.cut(matcher.admitted(draft.token_ids))
        now = matcher.forced(end=self._end)
        if now and draft.token_ids[: len(now)] != now:
            draft = Draft()
        forced = now if not draft.token_ids else matcher.forced(draft.token_ids, end=self._end)
        start = len(draft.token_ids)
        forced = forced[: max(0, limit - start)]
        if not forced:
            self._pending.pop(row, None)
            return draft.cut(limit)
        self._pending[row] = start, forced
        chance = draft.cumulative_acceptance[-1] if draft.cumulative_acceptance else 1.0
        acceptance = [chance * self._chance ** (i + 1) for i in range(len(forced))]
        sources = draft.sources + [None] * len(forced)
        return Draft(draft.token_ids + forced, draft.cumulative_acceptance + acceptance, sources)

    def score(self, row: int, written: Sequence[int]) -> None:
        """Learn from the target's tokens, whether or not the draft was verified."""
        start, forced = self._pending.pop(row, (0, []))
        for guess, token in zip(forced, written[start:], strict=False):
            self.met += 1
            self.right += guess == token
            self._chance += LEARN * ((guess == token) - self._chance)
            if guess != token:
                break

    def forget(self, row: int) -> None:
        """Discard a finished row."""
        self._pending.pop(row, None)


def admitted(matcher: Matcher, draft: Draft) -> Draft:
    """Return the part of a draft that a grammar allows, before anything is computed for the rest.

    A sampled draft keeps its first disallowed token: the rejection rule replaces it with another sample, and together
    the two give the right distribution.
    """
    count = matcher.admitted(draft.token_ids) if draft.token_ids else 0
    return draft.cut(count if draft.probabilities is None else count + 1)
