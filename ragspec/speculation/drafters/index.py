"""Where in a text of token ids each n-gram occurred last: a few positions of each."""

from __future__ import annotations

from collections.abc import Sequence

BITS = 21  # of a token id in a key; vocabularies are below two million
KEPT = 8  # kept per n-gram
LONGEST_MATCH = 32  # tokens; longer matches are not told apart


class NgramIndex:
    """A growing text. A position is the one just after an n-gram, where its continuation begins."""

    def __init__(self, smallest: int = 1, largest: int = 3) -> None:
        self.tokens: list[int] = []
        self._tables: list[dict[int, list[int]]] = [{} for _ in range(largest + 1)]
        self._smallest = smallest
        self._largest = largest

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append `token_ids`."""
        tokens, start = self.tokens, len(self.tokens)
        tokens.extend(token_ids)
        for n in range(self._smallest, self._largest + 1):
            table, key, kept = self._tables[n], 0, (1 << BITS * n) - 1
            for position in range(max(0, start + 1 - n), len(tokens)):
                key = (key << BITS | tokens[position]) & kept  # of the n-gram that ends with this token
                if position < max(n - 1, start):
                    continue
                positions = table.setdefault(key, [])
                positions.append(position + 1)
                if len(positions) > KEPT:
                    del positions[0]

    def find(self, suffix: Sequence[int]) -> list[int]:
        """Return up to KEPT positions before which the text ends as `suffix` does, latest last.

        Those of the longest n-gram are preferred; shorter ones fill up. The end of the text may be among them.
        """
        keys, key = [0], 0
        for n in range(1, min(self._largest, len(suffix)) + 1):
            key |= suffix[-n] << BITS * (n - 1)
            keys.append(key)
        found: dict[int, None] = {}
        for n in range(len(keys) - 1, self._smallest - 1, -1):
            for position in reversed(self._tables[n].get(keys[n], ())):
                found[position] = None
                if len(found) == KEPT:
                    return sorted(found)
        return sorted(found)


def match_length(text: Sequence[int], position: int, suffix: Sequence[int], floor: int = 0) -> int:
    """Return how many tokens from `floor` to `position`, LONGEST_MATCH at most, agree with the end of `suffix`."""
    longest = min(LONGEST_MATCH, position - floor, len(suffix))
    length = 0
    while length < longest and text[position - 1 - length] == suffix[-1 - length]:
        length += 1
    return length
