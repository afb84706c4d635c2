"""A record while the engine answers it.

The life of a row, and who moves it on:

    waiting   a request in the queue, read ahead, grouped by prefix; no Row yet          Scheduler._look_ahead
    admitted  it has a Row, a place in the cache and the prefix another place computed   Scheduler.admit, Engine._begin
    filling   a piece of its text is computed in each step, without drafts               Engine._plan (not `ready`)
    ready     all but its last token are computed: each step verifies a draft behind     Engine._plan (`ready`)
              that token and writes one token at least
    finished  its answer has ended: the place is free, the outcome is handed on          Engine._commit

A row may go back. One that outgrows the length its model restarts at is filled anew where it is (Engine._extend).
When a forward fails, or memory is short, all rows are sent back to the head of the queue: they keep what they wrote,
lose their places and what was computed, and are admitted again (OomPolicy, Scheduler.interrupt).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ragspec.engine.kv.prefix_blocks import shared
from ragspec.engine.model.layout import Segment
from ragspec.engine.sampling import Noise, agreement, draw, reject
from ragspec.models.logits_processors import Processors, token_logprobs
from ragspec.records import Failure, Generation, Request, TokenLogprob
from ragspec.speculation.copied_spans import CopiedSpans
from ragspec.speculation.drafters.base import Draft
from ragspec.stats import SpecStats
from ragspec.structured.grammars import Matcher

if TYPE_CHECKING:
    from ragspec.engine.constraint import Constraint


@dataclass(slots=True)
class RequestState:
    """tokens: prompt and answer; the keys and values of the first `computed` of them are at `place` in the cache.

    place: -1 while it has none. base: tokens of the text that generate() would have begun with: the prompt, or all that
    there were when it was last filled anew.
    """

    request: Request
    tokens: list[int]
    noise: Noise
    started: float
    place: int = -1
    computed: int = 0
    base: int = 0
    processors: Processors | None = None  # what its logits go through, where anything changes them
    grammar: Matcher | None = None  # where its answer is in its grammar, where it has one
    cached: int = 0  # prompt tokens whose keys and values came from another row
    spec: SpecStats = field(default_factory=SpecStats)
    first_at: float | None = None
    reason: str = ""  # why the answer has ended; "" while it has not
    guessed: bytearray = field(default_factory=bytearray)  # per token of the answer: 1 where a draft had it
    logprobs: list[TokenLogprob] = field(default_factory=list)  # per token of the answer, where they are asked for
    copies: CopiedSpans = field(init=False)

    def __post_init__(self) -> None:
        self.base = len(self.request.token_ids)
        self.copies = CopiedSpans(self.request.token_ids, self.request.passages)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.token_ids)

    @property
    def written(self) -> int:
        """Length of the answer so far."""
        return len(self.tokens) - len(self.request.token_ids)

    @property
    def room(self) -> int:
        """Tokens that the answer may still have."""
        return self.request.sampling.max_new_tokens - self.written

    @property
    def samples(self) -> bool:
        """Whether its tokens are drawn."""
        return self.request.sampling.temperature > 0

    @property
    def greedy(self) -> bool:
        """Whether its tokens are simply the best ones."""
        return self.processors is None and not self.samples

    @property
    def ready(self) -> bool:
        """Whether all but the last token are computed: the next forward writes."""
        return self.computed == len(self.tokens) - 1

    def outcome(self) -> Generation | Failure:
        """Return the finished answer."""
        if self.grammar is not None and self.grammar.problem:
            return Failure(self.request.index, self.grammar.problem, "RecordError")
        answer = self.tokens[self.prompt_tokens :]
        self.spec.end(len(answer))
        return Generation(
            self.request.index,
            answer,
            self.reason or "length",
            self.spec,
            latency_s=time.perf_counter() - self.started,
            time_to_first_token_s=None if self.first_at is None else self.first_at - self.started,
            cached_prompt_tokens=self.cached,
            guessed=bytes(self.guessed),
            copied=self.copies.worth_citing(answer),
            logprobs=tuple(self.logprobs),
        )


def reach_of(rows: Sequence[RequestState]) -> int:
    """Return how many tokens the rows have, on average."""
    return sum(len(row.tokens) for row in rows) // max(1, len(rows))


# -- places: the rows of the cache, and what each of them offers to requests that begin alike ------


class CacheRow:
    """A row of the cache, and whose keys and values it holds: those of the row under way, or of the last one."""

    __slots__ = ("group", "left", "left_base", "row")

    def __init__(self) -> None:
        self.row: RequestState | None = None
        self.left = array("i")
        self.left_base = 0
        self.group = -1

    @property
    def base(self) -> int:
        """Tokens that the row there began with, or the last one (Row.base)."""
        return self.row.base if self.row else self.left_base

    def leave(self) -> None:
        """Free the place; what its row computed stays until another row needs the place."""
        assert self.row is not None
        self.left, self.left_base = array("i", self.row.tokens[: self.row.computed]), self.row.base
        self.row = None

    def offers(self, tokens: array[int]) -> tuple[int, int]:
        """Return how many of `tokens` it holds now, and how many it will."""
        if self.row is None:
            held = shared(tokens, self.left)
            return held, held
        coming = shared(tokens, array("i", self.row.tokens))
        return min(coming, self.row.computed), coming


@dataclass(frozen=True, slots=True)
class Start:
    """`row` begins at its place with the first `tokens` tokens of place `donor`, which may be its own."""

    row: RequestState
    donor: int
    tokens: int


# -- what one row does in a step, and what the target makes of it: the items of plan, forward, accept and comm


@dataclass(slots=True)
class ScheduledRequest:
    """What one row does in a step: its last token and a draft behind it (decodes), or a piece of its text.

    writes: whether the last of `token_ids` is the row's last, so that a token follows. logprobs: of what the target
    wrote, where the record asks for them.
    """

    row: RequestState
    token_ids: list[int]
    draft: Draft = field(default_factory=Draft)
    decodes: bool = False
    writes: bool = True
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        """Of how many of its last tokens logits are wanted."""
        return 1 + len(self.draft.token_ids) if self.writes else 0

    @property
    def segment(self) -> Segment:
        """Where its tokens go."""
        row = self.row
        return Segment(row.place, row.computed, len(self.token_ids), alone=not self.decodes, base=row.base)

    @property
    def slots(self) -> int:
        """How many slots its row needs for it."""
        return self.row.computed + len(self.token_ids)


StepOutput = list[tuple[ScheduledRequest, list[int]]]  # each row's work and the tokens that the target wrote


def accept(work: Sequence[ScheduledRequest], logits: torch.Tensor, constraint: Constraint) -> StepOutput:
    """Return what the target writes after each row's tokens, up to its first disagreement with the draft.

    logits: (sum of what is wanted, vocab), row after row. constraint: knows what grammars admit.
    """
    masks = constraint.masks(work)
    greedy = any(item.writes and item.row.greedy for item in work)
    best: list[int] = logits.argmax(-1).tolist() if greedy else []
    written: StepOutput = []
    at = 0
    for item in work:
        end = at + item.wanted
        row, guesses = item.row, item.draft.token_ids
        if not item.writes:
            chosen = []
        elif not row.greedy:
            chosen = _choose(item, logits[at:end] if masks is None else masks.applied(logits[at:end], at))
        elif row.grammar is not None:
            chosen = constraint.greedy(row.grammar, guesses, best[at:end], logits[at:end])
        else:
            chosen = best[at : at + agreement(guesses, best[at:end]) + 1]
        most = row.request.sampling.logprobs
        if item.writes and most is not None:
            item.logprobs = token_logprobs(logits[at:end], chosen, most)
        written.append((item, chosen))
        at = end
    return written


def _choose(item: ScheduledRequest, logits: torch.Tensor) -> list[int]:
    """Return what one row writes, by its own processors, and its own noise where it samples."""
    row, guesses = item.row, item.draft.token_ids
    if row.processors is not None:
        logits = row.processors(logits, row.tokens, guesses)
    if not row.samples:
        chosen = logits.argmax(-1).tolist()
    else:
        weights = torch.softmax(logits.double(), dim=-1)
        if item.draft.probabilities is not None:
            return reject(weights, item.draft.probabilities, guesses, row.noise, row.written)
        chosen = draw(weights, [row.noise.at(row.written + i) for i in range(len(guesses) + 1)])
    return chosen[: agreement(guesses, chosen) + 1]
