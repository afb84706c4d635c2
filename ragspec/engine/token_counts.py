"""The tokens of a growing text, each once, and how often it has them.

>>> counts = TokenCounts(tokens, first=3)
>>> counts.update()  # reads what was appended to `tokens`
>>> counts.tokens, counts.times
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class TokenCounts:
    """Counts tokens[first:]. tokens, times: of each token, in the order in which they first come."""

    def __init__(self, text: Sequence[int], first: int) -> None:
        self._text = text
        self._read = first
        self._places: dict[int, int] = {}
        self.tokens = array("q")
        self.times = array("f")

    def update(self) -> None:
        """Count what has been appended."""
        for at in range(self._read, len(self._text)):
            token = self._text[at]
            place = self._places.setdefault(token, len(self.tokens))
            if place == len(self.tokens):
                self.tokens.append(token)
                self.times.append(0)
            self.times[place] += 1
        self._read = len(self._text)

    def place(self, token: int) -> int | None:
        """Return the index of a token in `tokens`, None if the text lacks it."""
        return self._places.get(token)
