"""What a grammar forces, as a draft: keys of an object, separators, the rest of a word once its beginning is clear.

The text is certain, how the model divides it into tokens is not: the chance that it divides it as llguidance does is
learnt in the run. A token boundary is never chosen by a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.speculation.drafters.base import Draft
from ragspec.structured.grammars import Matcher

LEARN = 0.02
FIRST_GUESS = 0.8


class ForcedTokens:
    """Adds forced tokens to drafts. end: the token that ends an answer too.

    met, right: how many the target came to, and how many of them it wrote so.
    """

    def __init__(self, *, end: bool = True) -> None:
        self._end = end
        self.met = 0
        self.right = 0
        self._chance = FIRST_GUESS
        self._pending: dict[int, tuple[int, list[int]]] = {}  # by row: where in the draft, and which tokens

    def join(self, row: int, matcher: Matcher, draft: Draft, limit: int) -> Draft:
        """Return a draft of `limit` tokens at most: what is forced now, or `draft` as far as it is admitted and on.

        row: any number that names it.
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
        chance = draft.survival[-1] if draft.survival else 1.0
        survival = [chance * self._chance ** (i + 1) for i in range(len(forced))]
        return Draft(draft.token_ids + forced, draft.survival + survival, draft.sources + [None] * len(forced))

    def score(self, row: int, written: Sequence[int]) -> None:
        """Learn from what the target wrote, whether the draft was verified or not."""
        start, forced = self._pending.pop(row, (0, []))
        for guess, token in zip(forced, written[start:], strict=False):
            self.met += 1
            self.right += guess == token
            self._chance += LEARN * ((guess == token) - self._chance)
            if guess != token:
                break

    def forget(self, row: int) -> None:
        """Forget a row that has ended."""
        self._pending.pop(row, None)


def admitted(matcher: Matcher, draft: Draft) -> Draft:
    """Return a draft as far as a grammar admits it, before anything is computed for the rest.

    One that was sampled keeps its first token that is not admitted: the rule that rejects it draws another in its
    place, and the two together give the right distribution.
    """
    count = matcher.admitted(draft.token_ids) if draft.token_ids else 0
    return draft.cut(count if draft.probabilities is None else count + 1)
