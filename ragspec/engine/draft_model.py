"""A smaller model that drafts for all rows at once, with keys and values of its own.

    speculation: {method: draft_model, draft_model: ...}

It catches up on what the target wrote, then writes one token after another for every row: as many as pay, by how often
its tokens were accepted of late and by what both models' steps cost.
Limit: one length for all rows of a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ragspec.engine.clock import Clock
from ragspec.engine.constraint import Constraint
from ragspec.engine.forward import Model
from ragspec.engine.layout import Segment
from ragspec.engine.proposers import NoDrafts
from ragspec.engine.row import Row
from ragspec.engine.sampling import draw
from ragspec.speculation.allocate import LEAST_GAIN
from ragspec.speculation.cost import Cost
from ragspec.speculation.drafters.base import Draft

LONGEST = 12
CHUNK = 512  # tokens of a forward while it catches up
LEARN = 0.05
PROBE_EVERY = 64  # steps between tries of a single token, while drafts do not pay


class DraftModel(NoDrafts):
    """The proposer. context_length: tokens that the draft attends to. width: the target's vocabulary."""

    def __init__(
        self, model: Model, width: int, context_length: int | None, num_tokens: int | None, cost: Cost | None
    ) -> None:
        self._model = model
        self._width = width
        self._context_length = context_length
        self._num_tokens = num_tokens
        self._cost = cost
        self._computed = [0] * model.cache.rows
        self._accepted = 0.7  # chance that a drafted token is accepted, given that those before it were
        self._step_s: float | None = None  # of one token for all rows
        self._idle = 0
        self._drafts: dict[int, Draft] = {}
        self._constraint = Constraint(Clock())  # its time is drafting's
        self.outgrown = 0  # rows that outgrew the draft and went on without it

    # -- what the engine tells ------------------------------------------------------------------------------------

    def admit(self, row: Row, donor: int, tokens: int) -> None:
        known = min(tokens, self._computed[donor])
        if known and donor != row.place:
            self._model.cache.copy(donor, row.place, known)
        self._computed[row.place] = known

    def extend(self, row: Row, token_ids: Sequence[int]) -> None:
        self._computed[row.place] = min(self._computed[row.place], len(row.tokens) - 1)
        draft = self._drafts.pop(row.place, None)
        if draft is None:
            return
        for guess, token in zip(draft.token_ids, token_ids, strict=False):
            self._accepted += LEARN * ((guess == token) - self._accepted)
            if guess != token:
                break

    def finish(self, row: Row) -> None:
        self.outgrown += self._left(row) <= 0

    def resize(self, rows: int) -> None:
        self._model.resize(rows)
        self._computed = [0] * rows
        self._drafts = {}

    def widen(self, rows: int) -> None:
        cache = self._model.cache
        cache.resize(rows, cache.slots)
        self._computed = (self._computed + [0] * rows)[:rows]

    def forget(self) -> None:
        self.resize(len(self._computed))  # its cache may have grown by half

    # -- drafting -------------------------------------------------------------------------------------------------

    def propose(self, rows: Sequence[Row], besides: int) -> list[Draft]:
        length = self._num_tokens or self._length(rows)
        limits = {row.place: max(0, min(length, row.room - 1, self._left(row))) for row in rows}
        drafts = {row.place: Draft() for row in rows}
        weights: dict[int, list[Any]] = {row.place: [] for row in rows}
        going = [row for row in rows if limits[row.place] > 0]
        if going:
            logits = self._catch_up(going)
        started = time.perf_counter()
        for step in range(1, max(limits.values(), default=0) + 1):
            going = [row for row in going if limits[row.place] >= step]
            if step > 1:
                logits = self._advance(going, drafts)
            self._write(going, logits, drafts, weights)
        if length > 1 and going:
            spent = (time.perf_counter() - started) / (length - 1)
            self._step_s = spent if self._step_s is None else self._step_s + LEARN * (spent - self._step_s)
        for row in rows:
            draft = drafts[row.place]
            if weights[row.place]:
                draft.probabilities = torch.stack(weights[row.place])
            if draft.token_ids:
                self._drafts[row.place] = draft
        return [drafts[row.place] for row in rows]

    def _left(self, row: Row) -> int:
        """Return how many more tokens of a row the draft can attend to."""
        return (1 << 30) if self._context_length is None else self._context_length - len(row.tokens)

    def _length(self, rows: Sequence[Row]) -> int:
        """Return the draft length that makes the most tokens per second; 0 where plain decoding does."""
        if self._cost is None or self._step_s is None:
            return 4
        reach = max(len(row.tokens) for row in rows)
        count = len(rows)
        plain = count / self._cost(count, count, reach)
        best, best_rate, expected, survival = 0, plain * LEAST_GAIN, 1.0, 1.0
        for length in range(1, LONGEST + 1):
            survival *= self._accepted
            expected += survival
            seconds = self._cost(count * (1 + length), count, reach) + length * self._step_s
            if expected * count / seconds > best_rate:
                best, best_rate = length, expected * count / seconds
        self._idle = 0 if best else self._idle + 1
        return best or int(self._idle % PROBE_EVERY == 0)

    def _catch_up(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute what the draft has not seen; return the logits, (rows, vocab), after each row's last token."""
        behind = [(row, len(row.tokens) - self._computed[row.place]) for row in rows]
        last: dict[int, torch.Tensor] = {}
        while behind:
            segments, token_ids, wanted, left, done, budget = [], [], [], [], [], CHUNK
            for row, missing in behind:
                count = min(missing, budget)
                if count <= 0:
                    left.append((row, missing))
                    continue
                start = self._computed[row.place]
                segments.append(Segment(row.place, start, count, alone=count > LONGEST + 1))
                token_ids += row.tokens[start : start + count]
                self._computed[row.place] += count
                budget -= count
                if count == missing:
                    wanted.append(len(token_ids) - 1)
                    done.append(row)
                else:
                    left.append((row, missing - count))
            logits = self._model.logits(segments, token_ids, wanted)
            last |= {row.place: logits[i] for i, row in enumerate(done)}
            behind = left
        return torch.stack([last[row.place] for row in rows])

    def _advance(self, rows: Sequence[Row], drafts: dict[int, Draft]) -> torch.Tensor:
        segments = [Segment(row.place, self._computed[row.place], 1) for row in rows]
        token_ids = [drafts[row.place].token_ids[-1] for row in rows]
        for row in rows:
            self._computed[row.place] += 1
        return self._model.logits(segments, token_ids, range(len(rows)))

    def _write(
        self, rows: Sequence[Row], logits: torch.Tensor, drafts: dict[int, Draft], weights: dict[int, list[Any]]
    ) -> None:
        """Append one token to each row's draft, chosen as the target would choose, from the draft's own logits."""
        logits = logits[:, : self._width]
        if logits.shape[1] < self._width:
            logits = torch.nn.functional.pad(logits, (0, self._width - logits.shape[1]), value=float("-inf"))
        greedy = logits.argmax(-1).tolist()
        for row, own, best in zip(rows, logits, greedy, strict=True):
            draft, scores = drafts[row.place], own[None]
            if row.grammar is not None:
                scores = self._constraint.masked(row.grammar, draft.token_ids, scores)
                best = int(scores.argmax())
            if row.processors is not None:
                scores = row.processors(scores, row.tokens + draft.token_ids)
            if row.samples:
                chances = torch.softmax(scores.double(), dim=-1)
                position = row.written + len(draft.token_ids)
                best = draw(chances, [row.noise.at(position, b"draft")])[0]
                weights[row.place].append(chances[0])
            elif row.processors is not None:
                best = int(scores.argmax())
            draft.token_ids.append(best)
            draft.survival.append(self._accepted ** len(draft.token_ids))
            draft.sources.append(None)
