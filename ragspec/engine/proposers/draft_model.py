"""A draft model that drafts for all rows at once, with its own KV cache; alone or together with copied passages.

    speculation: {method: draft_model, draft_model: ...}

It catches up on what the target generated, then generates one token after another for every row: as many as pay, by its
confidence and by the costs of both models' steps. Its tokens may differ from the target's (models/translation.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ragspec.engine.constraint import Constraint
from ragspec.engine.kv.common_prefix import shared
from ragspec.engine.model.forward import Model
from ragspec.engine.model.layout import Segment
from ragspec.engine.processing import Positions, processed
from ragspec.engine.profiler import Clock
from ragspec.engine.proposers.base import NoProposer, RowProposer, cut
from ragspec.engine.request_state import RequestState, reach_of
from ragspec.engine.sampling import draw
from ragspec.speculation.draft_length import BLIND, BLIND_OTHER, LONGEST, Confidence, DraftLength
from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.step_cost import Cost


class DraftView(Protocol):
    """One row in the draft model's tokens. own_tokens: whether they differ from the target's."""

    tokens: list[int]
    own_tokens: bool

    def extend(self, token_ids: Sequence[int]) -> int:
        """Append what the target generated; return how many leading tokens are unchanged."""

    def ends(self, token: int) -> bool:
        """Return whether the draft token `token` ends the text."""

    def guesses(self, drafted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the target's tokens for `drafted`, and for each the number of draft tokens that it depends on."""


Open = Callable[[RequestState], DraftView]


class SameTokensView:
    """A draft in the target's own tokens. The target may end an answer at any token, so none ends a draft."""

    own_tokens = False

    def __init__(self, row: RequestState) -> None:
        self.tokens = row.tokens

    def extend(self, token_ids: Sequence[int]) -> int:
        return len(self.tokens) - len(token_ids)

    def ends(self, token: int) -> bool:
        return False

    def guesses(self, drafted: Sequence[int]) -> tuple[list[int], list[int]]:
        return list(drafted), list(range(1, len(drafted) + 1))


# -- draft model -----------------------------------------------------------------------------------
CHUNK = 512  # tokens per forward while it catches up


@dataclass(slots=True)
class Sketch:
    """A row's draft in the making, in the draft model's tokens. sure: the probability of each of them."""

    row: RequestState
    script: DraftView
    token_ids: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)  # the distribution of each, if it was sampled
    cumulative_acceptance: float = 1.0
    guesses: list[int] = field(default_factory=list)  # the target's tokens
    rests: list[int] = field(default_factory=list)  # for each guess, how many of token_ids it depends on

    @property
    def noise(self) -> float:
        """The uniform number of its next token."""
        return self.row.noise.at(self.row.written + len(self.token_ids), b"draft")


class DraftModel(NoProposer):
    """Drafts with a model.

    Args:
        model: The draft model.
        width: The target's vocabulary size.
        context_length: The draft model's, None for no limit.
        num_tokens: Draft tokens per step; None for as many as pay.
        cost: Cost of the target's steps.
        open: Makes the view of a row in the draft model's tokens.
    """

    def __init__(
        self,
        model: Model,
        width: int,
        context_length: int | None,
        num_tokens: int | None,
        cost: Cost | None,
        open: Open = SameTokensView,
    ) -> None:
        self._model = model
        self._width = width
        self._context_length = context_length
        self._num_tokens = num_tokens
        self._cost = None if num_tokens else cost
        self._open = open
        self._confidence = Confidence()
        self._pace = DraftLength(self._cost, self._confidence, BLIND if open is SameTokensView else BLIND_OTHER)
        self._scripts: dict[int, DraftView] = {}  # by slot, of rows that were drafted for
        self._held: dict[int, list[int]] = {}  # by slot: the tokens in the draft model's cache
        self._sketches: dict[int, Sketch] = {}  # by slot, of this step
        self._constraint = Constraint(Clock())  # its time counts as drafting
        self.outgrown = 0  # rows that outgrew the draft model's context

    # -- engine events -----------------------------------------------------------------------------

    def admit(self, row: RequestState, donor: int, tokens: int) -> None:
        self._scripts.pop(row.place, None)
        self._sketches.pop(row.place, None)  # of a row that was preempted before its draft was judged

    def extend(self, row: RequestState, token_ids: Sequence[int]) -> None:
        script = self._scripts.get(row.place)
        if script is not None:
            kept = script.extend(token_ids)
            held = self._held[row.place]
            del held[_agreed(held, script.tokens, kept) :]
        sketch = self._sketches.pop(row.place, None)
        if sketch is not None:
            self._learn(sketch, token_ids)

    def finish(self, row: RequestState) -> None:
        self.outgrown += self._left(row) <= 0
        self._scripts.pop(row.place, None)

    def resize(self, rows: int) -> None:
        self._model.resize(rows)
        self._scripts, self._held, self._sketches = {}, {}, {}

    def widen(self, rows: int) -> None:
        if self._model.steps is not None:  # rows are read anew: each could need the memory of the longest
            self.resize(rows)
            return
        cache = self._model.cache
        cache.resize(rows, cache.slots)
        self._held = {place: held for place, held in self._held.items() if place < rows}

    def forget(self) -> None:
        self.resize(self._model.cache.rows)  # its cache may have grown in part

    # -- drafting ----------------------------------------------------------------------------------

    def propose(self, rows: Sequence[RequestState], prefill_tokens: int) -> list[Draft]:
        return cut(self.drafts(rows, rows), rows, self._cost, prefill_tokens)

    def drafts(self, rows: Sequence[RequestState], asked: Sequence[RequestState]) -> list[Draft]:
        """Return a draft for each decoding row: empty for rows not in `asked`, and where a draft cannot pay."""
        reach = reach_of(rows)
        able = [row for row in asked if min(row.room - 1, self._left(row)) > 0]
        picked = self._pace.chosen([self._missing(row) for row in able], [row.room for row in able], reach)
        opened = [Sketch(able[i], self._script(able[i])) for i in picked]
        # in the draft's tokens a text may be longer, or empty
        sketches = [sketch for sketch in opened if sketch.script.tokens and self._left(sketch.row) > 0]
        self.worked = bool(sketches)
        going, expected, depth = sketches, float(len(rows)), 0
        while going:
            started = time.perf_counter()
            self._write(going, self._advance(going) if depth else self._catch_up(going))
            if depth:
                self._pace.stepped(time.perf_counter() - started)
            depth += 1
            expected += sum(sketch.cumulative_acceptance for sketch in going)
            going = [sketch for sketch in going if self._may_go_on(sketch)]
            drafted = sum(len(sketch.token_ids) for sketch in sketches)
            acceptances = [sketch.cumulative_acceptance for sketch in going]
            going = [going[i] for i in self._pace.going_on(acceptances, expected, drafted, depth, len(rows), reach)]
        drafts = {sketch.row.place: self._draft(sketch) for sketch in sketches}
        return [drafts.get(row.place) or Draft() for row in rows]

    @property
    def promise(self) -> float:
        """Expected number of right tokens in a long draft."""
        mean = self._confidence.mean
        return sum(mean**length for length in range(1, 1 + (self._num_tokens or LONGEST)))

    def _left(self, row: RequestState) -> int:
        """Return how many more tokens of a row fit in the draft model's context."""
        if self._context_length is None:
            return 1 << 30
        script = self._scripts.get(row.place)
        return self._context_length - len(row.tokens if script is None else script.tokens)

    def _may_go_on(self, sketch: Sketch) -> bool:
        drafted = len(sketch.token_ids)
        limit = min(self._num_tokens or LONGEST, sketch.row.room - 1, self._left(sketch.row))
        return drafted < limit and not sketch.script.ends(sketch.token_ids[-1])

    def _missing(self, row: RequestState) -> int:
        """Return about how many tokens of a row the draft model has not computed yet."""
        script = self._scripts.get(row.place)
        return len(row.tokens) if script is None else len(script.tokens) - len(self._held[row.place])

    def _script(self, row: RequestState) -> DraftView:
        """Return a row's view, with the longest prefix in any slot of the draft model's cache copied to its own."""
        script = self._scripts.get(row.place)
        if script is None:
            script = self._scripts[row.place] = self._open(row)
            agreed = {place: _agreed(held, script.tokens, 0) for place, held in self._held.items()}
            donor = max(agreed, key=lambda place: (agreed[place], place == row.place), default=row.place)
            held = agreed.get(donor, 0)
            if held and donor != row.place:
                held = self._model.cache.share_prefix(donor, row.place, held)
            self._held[row.place] = script.tokens[:held]
        return script

    def _compute(self, segments: list[Segment], token_ids: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
        return self._model.logits(segments, token_ids, wanted)

    def _catch_up(self, sketches: Sequence[Sketch]) -> torch.Tensor:
        """Compute what is missing of each row; return the logits, (rows, vocab), after its last token."""
        last: dict[int, torch.Tensor] = {}
        behind = list(sketches)
        while behind:
            segments, token_ids, wanted, done, budget = [], [], [], [], CHUNK
            for sketch in behind:
                place, tokens = sketch.row.place, sketch.script.tokens
                held = self._held[place]
                piece = tokens[len(held) : len(held) + budget]
                if piece:
                    segments.append(Segment(place, len(held), len(piece), alone=len(piece) > LONGEST + 1))
                    token_ids += piece
                    held += piece
                    budget -= len(piece)
                    if len(held) == len(tokens):
                        wanted.append(len(token_ids) - 1)
                        done.append(place)
            started = time.perf_counter()
            logits = self._compute(segments, token_ids, wanted)
            if len(token_ids) > LONGEST * len(sketches):
                self._pace.filled(len(token_ids), time.perf_counter() - started)
            last |= {place: logits[i] for i, place in enumerate(done)}
            behind = [sketch for sketch in behind if sketch.row.place not in last]
        return torch.stack([last[sketch.row.place] for sketch in sketches])

    def _advance(self, sketches: Sequence[Sketch]) -> torch.Tensor:
        """Compute the last token of each sketch; return the logits after it."""
        segments = [Segment(sketch.row.place, len(self._held[sketch.row.place]), 1) for sketch in sketches]
        token_ids = [sketch.token_ids[-1] for sketch in sketches]
        for sketch in sketches:
            self._held[sketch.row.place].append(sketch.token_ids[-1])
        return self._compute(segments, token_ids, range(len(sketches)))

    def _write(self, sketches: Sequence[Sketch], logits: torch.Tensor) -> None:
        """Append one token to each sketch: the draft's best, or the row's own choice if tokens are the target's."""
        sampling: list[int] = []
        if not sketches[0].script.own_tokens:
            logits = self._as_the_target(sketches, logits)
            sampling = [at for at, sketch in enumerate(sketches) if sketch.row.samples]
        best = torch.softmax(logits, dim=-1).max(-1)
        sure, tokens = best.values.tolist(), best.indices.tolist()
        if sampling:
            chances = torch.softmax(logits[torch.tensor(sampling, device=logits.device)].double(), dim=-1)
            drawn = draw(chances, [sketches[at].noise for at in sampling])
            chance_of = chances.gather(1, torch.tensor(drawn, device=chances.device)[:, None]).squeeze(1).tolist()
            for at, weights, token, chance in zip(sampling, chances, drawn, chance_of, strict=True):
                tokens[at], sure[at] = token, chance
                sketches[at].weights.append(weights)
        for sketch, token, chance in zip(sketches, tokens, sure, strict=True):
            sketch.token_ids.append(token)
            sketch.sure.append(chance)
            sketch.cumulative_acceptance *= self._confidence.chance(chance)

    def _as_the_target(self, sketches: Sequence[Sketch], logits: torch.Tensor) -> torch.Tensor:
        """Return the draft's logits in the target's vocabulary, (rows, width), after the rows' own rules."""
        logits = logits[:, : self._width]
        if logits.shape[1] < self._width:
            logits = torch.nn.functional.pad(logits, (0, self._width - logits.shape[1]), value=float("-inf"))
        if any(sketch.row.grammar for sketch in sketches):
            logits = torch.cat([self._masked(sketch, logits[at : at + 1]) for at, sketch in enumerate(sketches)])
        after = [Positions(sketch.row, sketch.token_ids, len(sketch.token_ids)) for sketch in sketches]
        return processed(logits, after)

    def _masked(self, sketch: Sketch, logits: torch.Tensor) -> torch.Tensor:
        """Return logits, (1, width), after the row's grammar."""
        grammar = sketch.row.grammar
        return logits if grammar is None else self._constraint.masked(grammar, sketch.token_ids, logits)

    # -- results -----------------------------------------------------------------------------------

    def _draft(self, sketch: Sketch) -> Draft:
        """Return a sketch as a draft in the target's tokens."""
        guesses, rests = sketch.script.guesses(sketch.token_ids)
        unknown = next((i for i, guess in enumerate(guesses) if guess >= self._width), len(guesses))
        sketch.guesses, sketch.rests = guesses[: min(unknown, sketch.row.room - 1)], rests
        acceptance, upto, value = [], 0, 1.0
        for count in rests[: len(sketch.guesses)]:
            for sure in sketch.sure[upto:count]:
                value *= self._confidence.chance(sure)
            upto = max(upto, count)
            acceptance.append(value)
        self._sketches[sketch.row.place] = sketch
        probabilities: Any = torch.stack(sketch.weights) if sketch.weights else None
        return Draft(sketch.guesses, acceptance, [None] * len(acceptance), probabilities)

    def _learn(self, sketch: Sketch, token_ids: Sequence[int]) -> None:
        """Update the confidence by comparing a sketch with what the target generated."""
        known = 0
        for i, (guess, token) in enumerate(zip(sketch.guesses, token_ids, strict=False)):
            upto, right = sketch.rests[i], guess == token
            for sure in sketch.sure[known : upto if right else known + 1]:
                self._confidence.observe(sure, right)
            known = max(known, upto)
            if not right:
                break


def _agreed(held: Sequence[int], tokens: Sequence[int], known: int) -> int:
    """Return how many leading tokens of `held` match a text whose last token is not computed; `known` are known to."""
    return max(0, min(len(held), len(tokens) - 1, known + shared(held[known:], tokens[known:])))


# -- hybrid ----------------------------------------------------------------------------------------
class HybridProposer(NoProposer):
    """Copied passages and a draft model together: the model drafts for rows for which the passages promise less.

    The draft with more expected tokens is used whole. For sampled rows the model's draft is used if it was made: its
    samples must not decide whether it counts. passages: follows rows through its owner; here it only drafts.
    """

    def __init__(self, passages: RowProposer, model: DraftModel, cost: Cost | None) -> None:
        self._passages = passages
        self._model = model
        self._cost = cost

    def propose(self, rows: Sequence[RequestState], prefill_tokens: int) -> list[Draft]:
        self._passages.follow(rows, prefill_tokens)
        guesses = self._passages.guess(rows)
        promise = self._model.promise
        asked = [row for row, guess in zip(rows, guesses, strict=True) if sum(guess.cumulative_acceptance) < promise]
        drafts = self._model.drafts(rows, asked)
        best = [_better(guess, draft) for guess, draft in zip(guesses, drafts, strict=True)]
        return cut(best, rows, self._cost, prefill_tokens)

    @property
    def worked(self) -> bool:  # type: ignore[override]
        return self._model.worked

    @property
    def outgrown(self) -> int:
        """Rows that outgrew the draft model's context."""
        return self._model.outgrown

    def admit(self, row: RequestState, donor: int, tokens: int) -> None:
        self._model.admit(row, donor, tokens)

    def extend(self, row: RequestState, token_ids: Sequence[int]) -> None:
        self._model.extend(row, token_ids)

    def finish(self, row: RequestState) -> None:
        self._model.finish(row)

    def resize(self, rows: int) -> None:
        self._model.resize(rows)

    def widen(self, rows: int) -> None:
        self._model.widen(rows)

    def forget(self) -> None:
        self._model.forget()


def _better(guess: Draft, draft: Draft) -> Draft:
    sampled = draft.probabilities is not None
    return draft if sampled or sum(draft.cumulative_acceptance) > sum(guess.cumulative_acceptance) else guess
