"""What a draft model reads of a row: its tokens, which need not be the target's (models/translation.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ragspec.engine.row import Row


class Script(Protocol):
    """One row in the draft's tokens. tokens: all of them. own_tokens: whether they are other ones than the target's."""

    tokens: list[int]
    own_tokens: bool

    def extend(self, token_ids: Sequence[int]) -> int:
        """Take in what the target wrote; return how many of the first tokens are as they were."""

    def ends(self, token: int) -> bool:
        """Return whether nothing follows `token` of the draft."""

    def guesses(self, drafted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the target's tokens for `drafted`, and on how many of these each of them rests."""


Open = Callable[[Row], Script]


class Same:
    """A draft of the target's own tokens. The target may end an answer at any of them, so none ends a draft."""

    own_tokens = False

    def __init__(self, row: Row) -> None:
        self.tokens = row.tokens

    def extend(self, token_ids: Sequence[int]) -> int:
        return len(self.tokens) - len(token_ids)

    def ends(self, token: int) -> bool:
        return False

    def guesses(self, drafted: Sequence[int]) -> tuple[list[int], list[int]]:
        return list(drafted), list(range(1, len(drafted) + 1))
