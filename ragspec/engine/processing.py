"""Logits processors of several requests at once, at all positions of their drafts.

    >>> processed(logits, [Positions(row, draft.token_ids) for row, draft in ...])

Requests of the same settings whose processors read only which tokens a text has, and how often, are processed together:
penalties, biases, top-k, top-p. Where processors read the order or the number of tokens (n-grams, minimum lengths), a
request is processed alone, position after position.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ragspec.engine.request_state import RequestState
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
    """See Texts."""

    def __init__(self, asked: Sequence[Positions], logits: torch.Tensor) -> None:
        self._asked = asked
        self._logits = logits

    def distinct(self) -> torch.Tensor:
        """See Texts. A token may be there several times."""
        return self._padded((each.row.distinct, each.row.tokens[0]) for each in self._asked)

    def answers(self) -> torch.Tensor:
        """See Texts."""
        beyond = self._logits.shape[1]
        return self._padded((each.row.tokens[each.row.prompt_tokens :], beyond) for each in self._asked)

    def _padded(self, texts: Iterator[tuple[Sequence[int], int]]) -> torch.Tensor:
        """Return texts and the drafts after them, (rows of logits, tokens), filled up with each text's second part."""
        known = list(texts)
        width = max(len(text) + len(each.draft) for (text, _), each in zip(known, self._asked, strict=True))
        found = np.empty((len(self._logits), width), np.int64)
        at = 0
        for (text, pad), (_, draft, first) in zip(known, self._asked, strict=True):
            end = at + len(draft) - first + 1
            found[at:end, : len(text)] = text
            found[at:end, len(text) :] = pad
            for behind, token in enumerate(draft):  # it is in the text of the positions after it
                found[max(at, at + behind + 1 - first) : end, len(text) + behind] = token
            at = end
        return torch.from_numpy(found).to(self._logits.device)


def _indices(places: Sequence[int] | np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(places, dtype=torch.long, device=logits.device)
