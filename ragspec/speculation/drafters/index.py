"""Where in a text of token ids an n-gram stood: the latest few places of each."""

from __future__ import annotations

from collections.abc import Sequence

BITS = 21  # of a token id in a key; vocabularies are below two million
PLACES = 8  # kept per n-gram
REACH = 32  # longest match that is told apart


class NgramIndex:
    """A growing text. A place is the position just after an n-gram: where its continuation begins."""

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
            for place in range(max(0, start + 1 - n), len(tokens)):
                key = (key << BITS | tokens[place]) & kept  # of the n-gram that ends with this token
                if place < max(n - 1, start):
                    continue
                places = table.setdefault(key, [])
                places.append(place + 1)
                if len(places) > PLACES:
                    del places[0]

    def find(self, suffix: Sequence[int]) -> list[int]:
        """Return up to PLACES places whose text before them ends like `suffix`, latest last.

        Those of the longest n-gram come first, shorter ones fill up. The end of the text may be among them.
        """
        found: list[int] = []
        for n in range(min(self._largest, len(suffix)), self._smallest - 1, -1):
            places = self._tables[n].get(_key(suffix[-n:]), [])
            found += [place for place in reversed(places) if place not in found][: PLACES - len(found)]
        return sorted(found)


def _key(ngram: Sequence[int]) -> int:
    key = 0
    for token in ngram:
        key = key << BITS | token
    return key


def match_length(text: Sequence[int], place: int, suffix: Sequence[int], floor: int = 0) -> int:
    """Return how many tokens before `place` agree with the end of `suffix`, up to REACH; none before `floor`."""
    longest = min(REACH, place - floor, len(suffix))
    length = 0
    while length < longest and text[place - 1 - length] == suffix[-1 - length]:
        length += 1
    return length
