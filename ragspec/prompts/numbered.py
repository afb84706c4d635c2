"""The passages of several records, by number: those with one title and text are one.

>>> passages = Numbered(); records = [passages.of(record) for record in window]
>>> plan = shared_order(records, passages.weights)
>>> passages.arranged(window[0], records[0], plan.orders[0])
"""

from __future__ import annotations

from dataclasses import replace

from ragspec.prompts.builder import rank
from ragspec.records import Passage, Record, Tokenizer

SAMPLE = 64  # passages whose tokens are counted, to tell tokens from characters


class Numbered:
    """weights: characters of each passage."""

    def __init__(self) -> None:
        self.weights: dict[int, int] = {}
        self._numbers: dict[tuple[str | None, str, int], int] = {}

    def of(self, record: Record, most: int | None = None) -> list[int]:
        """Return a record's passages, in its order; a repeated one counts as another. most: only so many, the best."""
        times: dict[tuple[str | None, str], int] = {}
        return [self._number(record.contexts[place], times) for place in kept_places(record, most)]

    def _number(self, passage: Passage, times: dict[tuple[str | None, str], int]) -> int:
        key = (passage.title, passage.text)
        times[key] = times.get(key, 0) + 1
        number = self._numbers.setdefault((*key, times[key]), len(self._numbers))
        self.weights[number] = len(passage.text) + len(passage.title or "")
        return number

    @staticmethod
    def arranged(record: Record, passages: list[int], order: list[int]) -> Record:
        """Return a record with those of its passages in this order."""
        places = dict(zip(passages, kept_places(record, len(passages)), strict=True))
        return replace(record, order=tuple(places[passage] for passage in order))

    def tokens_per_character(self, tokenizer: Tokenizer) -> float:
        """Return roughly how many tokens a character of these passages makes."""
        texts = [text for _, text, _ in list(self._numbers)[:SAMPLE]]
        tokens = sum(len(tokenizer.encode(text, special_tokens=False)) for text in texts)
        return tokens / max(1, sum(map(len, texts)))


def kept_places(record: Record, most: int | None) -> list[int]:
    """Return the places of a record's best passages, `most` at most, in its order."""
    return sorted(rank(record.contexts)[:most])
