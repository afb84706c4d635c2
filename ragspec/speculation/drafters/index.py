"""Where in a text of token ids each n-gram occurred last."""

from __future__ import annotations

from collections.abc import Sequence

BITS = 21  # of a token id in a key; vocabularies are below two million
KEPT = 8  # positions that are looked at
LONGEST_MATCH = 32  # tokens; longer matches are not told apart


class NgramIndex:
    """A growing text. A position is the one just after an n-gram, where its continuation begins.

    Each n-gram's positions are a chain: the latest is in a table, and each knows the one before it. A list for every
    n-gram of a prompt would take several times as long to make. What is appended is indexed when somebody looks: a text
    that nobody asks about costs next to nothing.
    """

    def __init__(self, smallest: int = 1, largest: int = 3) -> None:
        self.tokens: list[int] = []
        self._latest: list[dict[int, int]] = [{} for _ in range(largest + 1)]  # by n: n-gram -> position
        self._before: list[list[int]] = [[0] for _ in range(largest + 1)]  # by n: position -> the one before; 0: none
        self._smallest = smallest
        self._largest = largest
        self._indexed = 0  # tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append `token_ids`."""
        self.tokens.extend(token_ids)

    def _catch_up(self) -> None:
        """Take in the tokens that were appended since."""
        start, self._indexed = self._indexed, len(self.tokens)
        token_ids = self.tokens[start:]
        for n in range(self._smallest, self._largest + 1):
            latest, before, kept = self._latest[n], self._before[n], (1 << BITS * n) - 1
            key = 0
            for token in self.tokens[max(0, start + 1 - n) : start]:
                key = key << BITS | token
            for position, token in enumerate(token_ids, start + 1):
                key = (key << BITS | token) & kept  # of the n-gram that ends with this token
                if position < n:
                    before.append(0)
                else:
                    before.append(latest.get(key, 0))
                    latest[key] = position

    def find(self, suffix: Sequence[int]) -> list[int]:
        """Return up to KEPT positions before which the text ends as `suffix` does, latest last.

        Those of the longest n-gram are preferred; shorter ones fill up. The end of the text may be among them.
        """
        if self._indexed < len(self.tokens):
            self._catch_up()
        keys, key = [0], 0
        for n in range(1, min(self._largest, len(suffix)) + 1):
            key |= suffix[-n] << BITS * (n - 1)
            keys.append(key)
        found: dict[int, None] = {}
        for n in range(len(keys) - 1, self._smallest - 1, -1):
            position, before = self._latest[n].get(keys[n], 0), self._before[n]
            while position:
                found[position] = None
                if len(found) == KEPT:
                    return sorted(found)
                position = before[position]
        return sorted(found)


def match_length(text: Sequence[int], position: int, suffix: Sequence[int], floor: int = 0) -> int:
    """Return how many tokens from `floor` to `position`, LONGEST_MATCH at most, agree with the end of `suffix`."""
    longest = min(LONGEST_MATCH, position - floor, len(suffix))
    length = 0
    while length < longest and text[position - 1 - length] == suffix[-1 - length]:
        length += 1
    return length
