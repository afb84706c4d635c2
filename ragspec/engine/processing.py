"""Logits processors of several requests at once, at all positions of their drafts.

    >>> processed(logits, [Positions(row, draft.token_ids) for row, draft in ...])

Requests of the same settings whose processors read only which tokens a text has, and how often, are processed together:
penalties, biases, top-k, top-p. Where processors read the order or the number of tokens (n-grams, minimum lengths), a
request is processed alone, position after position.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ragspec.engine.request_state import RequestState
from ragspec.engine.token_counts import TokenCounts
from ragspec.models.logits_processors import Texts


class Positions(NamedTuple):
    """A request's rows of logits: those after its tokens and draft[:first], ..., draft[:len(draft)]."""

    row: RequestState
    draft: Sequence[int] = ()
    first: int = 0

    @property
    def size(self) -> int:
        """The number of its rows."""
        return len(self.draft) - self.first + 1


def processed(logits: torch.Tensor, asked: Sequence[Positions]) -> torch.Tensor:
    """Return the logits, (sum of sizes, vocab), as each request's processors change them."""
    kinds: dict[Hashable, list[Positions]] = {}
    places: dict[Hashable, list[int]] = {}
    at = 0
    for each in asked:
        kind = each.row.alike
        kinds.setdefault(kind, []).append(each)
        places.setdefault(kind, []).extend(range(at, at + each.size))
        at += each.size
    if len(kinds) == 1:
        return _alike(logits, asked)
    order = [at for several in places.values() for at in several]
    found = [_alike(logits[_indices(places[kind], logits)], several) for kind, several in kinds.items()]
    return torch.cat(found)[_indices(np.argsort(order), logits)]


def _alike(logits: torch.Tensor, asked: Sequence[Positions]) -> torch.Tensor:
    """Return the logits of requests of one kind."""
    row, draft, first = asked[0]
    if row.processors is None:
        return logits
    if not row.processors.join:
        return row.processors(logits, [*row.tokens, *draft[:first]], draft[first:])
    return row.processors.together(logits, _Texts(asked, logits))


class _Texts(Texts):
    """The texts of requests, and their drafts as far as each position has them. Short ones are filled up."""

    def __init__(self, asked: Sequence[Positions], logits: torch.Tensor) -> None:
        self._asked = asked
        self._logits = logits

    def tokens(self) -> torch.Tensor:
        """See Texts. A token may be there several times."""
        tokens, _ = self._counted([each.row.text_counts for each in self._asked])
        return torch.from_numpy(tokens).to(self._logits.device)

    def answers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See Texts."""
        tokens, times = self._counted([each.row.answer_counts for each in self._asked])
        return torch.from_numpy(tokens).to(self._logits.device), torch.from_numpy(times).to(self._logits)

    def _counted(self, known: Sequence[TokenCounts]) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens of the text of each row of logits, and how often it has them, (rows, n) each.

        Texts with fewer tokens repeat their first one; a text without any has token 0 for 0 times.
        """
        for counts in known:
            counts.update()
        width = max(1, *(len(counts.tokens) + len(each.draft) for counts, each in zip(known, self._asked, strict=True)))
        tokens = np.full((len(self._logits), width), -1, np.int64)
        times = np.zeros((len(self._logits), width), np.float32)
        at = 0
        for counts, each in zip(known, self._asked, strict=True):
            rows = slice(at, at + each.size)
            tokens[rows, : len(counts.tokens)] = np.asarray(counts.tokens)
            times[rows, : len(counts.times)] = np.asarray(counts.times)
            _add_draft(tokens[rows], times[rows], counts, each)
            at += each.size
        missing = tokens < 0
        np.copyto(tokens, np.maximum(tokens[:, :1], 0), where=missing)
        np.copyto(times, times[:, :1], where=missing)
        return tokens, times


def _add_draft(tokens: np.ndarray, times: np.ndarray, counts: TokenCounts, asked: Positions) -> None:
    """Count the tokens of a draft in the texts of the positions after them."""
    new: dict[int, int] = {}
    for behind, token in enumerate(asked.draft):
        place = counts.place(token)
        if place is None:
            place = new.setdefault(token, len(counts.tokens) + len(new))
        after = max(0, behind + 1 - asked.first)
        tokens[after:, place] = token
        times[after:, place] += 1


def _indices(places: Sequence[int] | np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(places, dtype=torch.long, device=logits.device)
