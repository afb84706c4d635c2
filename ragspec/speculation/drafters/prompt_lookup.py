"""Prompt lookup: continue the latest position in the row's own prompt and answer that ends as the row does.

    speculation: {method: prompt_lookup, ngram_min: 1, ngram_max: 3}

Source: Saxena 2023, "Prompt lookup decoding". Limit: one match, no vote; method `context` sees more.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.drafters.calibration import Calibration
from ragspec.speculation.drafters.ngram_index import Match, NgramIndex, Proposals, match_length


class PromptLookup:
    """Drafts by n-grams of `smallest` to `largest` tokens.

    native.py drafts the same faster. note: why it does not, for the user.
    """

    def __init__(self, smallest: int = 1, largest: int = 3) -> None:
        self.note = ""
        self._smallest = smallest
        self._largest = max(smallest, largest)
        self.calibration = Calibration()

    def open(self, prompt: Sequence[int], passages: Sequence[tuple[int, int]] = ()) -> LookupRow:
        """Return the drafter of one record."""
        return LookupRow(prompt, self._smallest, self._largest, self.calibration)


class LookupRow:
    """Prompt lookup for one record."""

    def __init__(self, prompt: Sequence[int], smallest: int, largest: int, calibration: Calibration) -> None:
        self._index = NgramIndex(smallest, largest)
        self._index.extend(prompt)
        self._largest = largest
        self._prompt_tokens = len(prompt)
        self._proposals = Proposals(calibration)

    def propose(self, limit: int) -> Draft:
        """Return the continuation of the latest position that ends with the longest n-gram found."""
        tokens = self._index.tokens
        end = len(tokens)
        positions = [position for position in self._index.find(tokens) if position < end]
        found = [(match_length(tokens, position, tokens), position) for position in positions]
        if not found:
            return Draft()
        length, position = max(found, key=lambda match: (min(match[0], self._largest), match[1]))
        return self._proposals.build([Match(tokens, position, end, 0, length, True)], limit, self._prompt_tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the emitted tokens."""
        self._proposals.score(token_ids)
        self._index.extend(token_ids)

    def close(self) -> None:
        """Do nothing."""
