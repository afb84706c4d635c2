"""Which record is in which slot of vLLM's batch: vLLM hands over token ids only, and moves records between steps.

A record is recognised by its tokens: first in its own slot, then among the records that were moved, or preempted and
brought back. Two records with the same tokens so far get the same drafts, whichever is taken for which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ragspec.speculation.citations import Copies
from ragspec.speculation.drafters.base import Draft, RowDrafter
from ragspec.structured.grammars import Matcher

SKIPPED = 64  # tokens that a record may write unseen: near its model length, vLLM asks for no drafts
KEEP = 256  # records outside the batch, finished or preempted, before the oldest is given up


@dataclass(slots=True, eq=False)
class Tracked:
    """A record in vLLM's batch. tokens: prompt and answer as far as seen, int32. end: how many there may be."""

    tokens: np.ndarray
    prompt_tokens: int
    drafters: Mapping[str, RowDrafter]
    copies: Copies
    end: int
    draft: Draft = field(default_factory=Draft)  # what was proposed for the coming tokens
    guessed: bytearray = field(default_factory=bytearray)  # per token of the answer: 1 where a draft had it
    grammar: Matcher | None = None  # where its answer is in its grammar, where it has one

    def extend(self, fresh: np.ndarray, emitted: int) -> None:
        """Take in new tokens; the last `emitted` are the last step's, and all but one of these were drafts."""
        token_ids = fresh.tolist()
        missed, emission = token_ids[: len(token_ids) - emitted], token_ids[len(token_ids) - emitted :]
        draft = self.draft if not missed else Draft()
        self.copies.note(len(self.tokens) - self.prompt_tokens, draft, token_ids)
        self.guessed += b"\0" * len(missed) + b"\1" * (len(emission) - 1) + b"\0" * bool(emission)
        for drafter in self.drafters.values():
            drafter.extend(token_ids)
        if self.grammar is not None:
            self.grammar.take(token_ids)
        self.tokens = np.concatenate([self.tokens, fresh])
        self.draft = Draft()

    def close(self) -> None:
        """Close its drafters: it is finished."""
        for drafter in self.drafters.values():
            drafter.close()


class Rows:
    """The records that vLLM is answering. open: makes a Tracked of a prompt."""

    def __init__(self, open: Callable[[np.ndarray], Tracked]) -> None:
        self._open = open
        self._slots: dict[int, Tracked] = {}
        self._away: list[Tracked] = []  # not in the batch; longest away first

    def __len__(self) -> int:
        """Records that it knows, those outside the batch among them."""
        return len(self._slots) + len(self._away)

    def update(
        self, sampled: Sequence[Sequence[int]], lengths: np.ndarray, tokens: np.ndarray
    ) -> tuple[dict[int, Tracked], bool]:
        """Return the record of every slot that wrote, and whether the step was more than one of decoding.

        It was if it computed prompts, those of preempted records too, or if it came after others that nobody saw.
        sampled: per slot the tokens just written, none where a prompt is not complete yet. lengths: (slots,) tokens of
        each. tokens: (slots, most tokens) ids.
        """
        writing = {slot: int(lengths[slot]) for slot, ids in enumerate(sampled) if len(ids)}
        seen: dict[int, Tracked] = {}
        for slot, length in writing.items():
            row = self._slots.get(slot)
            if row is not None and continues(row, tokens[slot], length - len(sampled[slot])):
                seen[slot] = row
        there, away = set(map(id, seen.values())), set(map(id, self._away))
        # in the batch before but not recognised in its slot: it moved, was preempted, or is finished
        self._away += [row for row in self._slots.values() if id(row) not in there]
        fresh = False
        for slot, length in writing.items():
            before = length - len(sampled[slot])
            row = seen.get(slot) or self._came_back(tokens[slot], before)
            if row is None:
                row, fresh = self._open(tokens[slot, :before].copy()), True
            fresh = fresh or id(row) in away or len(row.tokens) < before
            row.extend(tokens[slot, len(row.tokens) : length].copy(), len(sampled[slot]))
            seen[slot] = row
        self._slots = seen
        while len(self._away) > KEEP:
            self._away.pop(0).close()
        return dict(sorted(seen.items())), fresh or len(writing) < len(sampled)

    def _came_back(self, tokens: np.ndarray, before: int) -> Tracked | None:
        fitting = [row for row in self._away if continues(row, tokens, before)]
        if not fitting:
            return None
        row = max(fitting, key=lambda row: len(row.tokens))
        self._away.remove(row)
        return row

    def finish(self, prompt: np.ndarray, answer: Sequence[int]) -> Tracked | None:
        """Return, close and forget the record that wrote `answer`; None where it was never seen writing."""
        whole = np.concatenate([prompt, np.asarray(answer, dtype=np.int32)])
        for row in self._all():
            length = min(len(row.tokens), len(whole))  # the last step may have written beyond its end
            if row.prompt_tokens == len(prompt) < length and np.array_equal(row.tokens[:length], whole[:length]):
                self._slots = {slot: other for slot, other in self._slots.items() if other is not row}
                self._away = [other for other in self._away if other is not row]
                row.close()
                return row
        return None

    def _all(self) -> Iterator[Tracked]:
        yield from sorted([*self._away, *self._slots.values()], key=lambda row: -len(row.tokens))


def continues(row: Tracked, tokens: np.ndarray, before: int) -> bool:
    """Return whether a slot whose first `before` tokens are not of this step can be this record."""
    length = len(row.tokens)
    return before - SKIPPED <= length <= before and np.array_equal(row.tokens, tokens[:length])
