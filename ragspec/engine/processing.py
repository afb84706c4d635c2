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
    """The texts of requests, and their drafts as far as each position has them. Short ones are filled up."""

    def __init__(self, asked: Sequence[Positions], logits: torch.Tensor) -> None:
        self._asked = asked
        self._logits = logits

    def tokens(self) -> torch.Tensor:
        """See Texts. A token may be there several times."""
        found = self._empty(max(len(each.row.seen) + len(each.draft) for each in self._asked), np.int64)
        for part, (row, draft, first) in self._parts(found):
            seen = list(row.seen)
            part[:, : len(seen)] = seen
            part[:, len(seen) :] = seen[0]
            for behind, token in enumerate(draft):
                part[max(0, behind + 1 - first) :, len(seen) + behind] = token
        return torch.from_numpy(found).to(self._logits.device)

    def answers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See Texts. Tokens of later positions' drafts are there 0 times."""
        known = [list(dict.fromkeys([*each.row.counts, *each.draft])) for each in self._asked]
        width = max(1, *(len(tokens) for tokens in known))
        found, counts = self._empty(width, np.int64), self._empty(width, np.float32)
        parts = zip(known, self._parts(found), self._parts(counts), strict=True)
        for tokens, (part, (row, draft, first)), (count, _) in parts:
            part[:, : len(tokens)] = tokens
            count[:, : len(tokens)] = [row.counts.get(token, 0) for token in tokens]
            for behind, token in enumerate(draft):
                count[max(0, behind + 1 - first) :, tokens.index(token)] += 1
            part[:, len(tokens) :] = tokens[0] if tokens else 0
            count[:, len(tokens) :] = count[:, :1] if tokens else 0
        device, dtype = self._logits.device, self._logits.dtype
        return torch.from_numpy(found).to(device), torch.from_numpy(counts).to(device, dtype)

    def _empty(self, width: int, dtype: type) -> np.ndarray:
        return np.empty((len(self._logits), width), dtype)

    def _parts(self, found: np.ndarray) -> Iterator[tuple[np.ndarray, Positions]]:
        """Yield each request's rows of an array."""
        at = 0
        for each in self._asked:
            yield found[at : at + each.size], each
            at += each.size


def _indices(places: Sequence[int] | np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(places, dtype=torch.long, device=logits.device)
