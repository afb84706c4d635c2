"""The state of a request in the engine, and what it does in one step.

    waiting   a request in the queue, read ahead and grouped by prefix; no state yet    Scheduler._look_ahead
    admitted  it has a state, a slot in the cache, and a prefix that another computed   Scheduler.admit, Engine._begin
    filling   a chunk of its text is computed in each step, without drafts              Engine._plan (not `ready`)
    ready     all but its last token are computed: each step verifies a draft after     Engine._plan (`ready`)
              that token, and generates at least one token
    finished  its answer has ended: the slot is freed and the outcome yielded           Engine._commit

A request may go back. One that outgrows the length at which its model restarts is recomputed in its slot
(Engine._extend). After a failed forward or a lack of memory all requests are preempted: they keep their tokens but lose
slot and KV cache, and are admitted again from the head of the queue (OomPolicy, Scheduler.interrupt).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ragspec.engine.kv.common_prefix import shared
from ragspec.engine.model.layout import Segment
from ragspec.engine.sampling import Noise
from ragspec.engine.token_counts import TokenCounts
from ragspec.models.logits_processors import Processors
from ragspec.records import Failure, Generation, Request, TokenLogprob
from ragspec.speculation.copied_spans import CopiedSpans
from ragspec.speculation.drafters.base import Draft
from ragspec.stats import SpecStats
from ragspec.structured.grammars import Matcher


@dataclass
class RequestState:
    """A request under way. tokens: prompt and answer; the first `computed` of them are in the cache at `place`.

    place: its slot in the cache, -1 for none. base: the text length that generate() would have started with: the
    prompt's, or that of the whole text when it was last recomputed.
    """

    request: Request
    tokens: list[int]
    noise: Noise
    started: float
    ends: frozenset[int] = frozenset()  # tokens that end its answer
    place: int = -1
    computed: int = 0
    base: int = 0
    processors: Processors | None = None  # logits processors, None if nothing changes its logits
    grammar: Matcher | None = None  # state of the answer's grammar, if it has one
    cached: int = 0  # prompt tokens taken from another row's cache
    spec: SpecStats = field(default_factory=SpecStats)
    first_at: float | None = None
    reason: str = ""  # why the answer has ended, "" if it has not
    problem: str = ""  # why it has failed, "" if it has not
    guessed: bytearray = field(default_factory=bytearray)  # per token of the answer: 1 if it was an accepted draft
    logprobs: list[TokenLogprob] = field(default_factory=list)  # per token of the answer, if requested
    prompt_tokens: int = field(init=False)  # length of the prompt
    most_tokens: int = field(init=False)  # most tokens of prompt and answer
    copies: CopiedSpans = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = self.base = len(self.request.token_ids)
        self.most_tokens = self.request.most_tokens
        self.copies = CopiedSpans(self.request.token_ids, self.request.passages)

    @property
    def written(self) -> int:
        """Length of the answer so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def room(self) -> int:
        """Maximum number of further tokens."""
        return self.most_tokens - len(self.tokens)

    @cached_property
    def samples(self) -> bool:
        """Whether its tokens are sampled."""
        return self.request.sampling.temperature > 0

    @cached_property
    def greedy(self) -> bool:
        """Whether its tokens are the argmax of the raw logits."""
        return self.processors is None and not self.samples

    @cached_property
    def needs_logits(self) -> bool:
        """Whether more is needed of it than the best tokens."""
        return not self.greedy or self.grammar is not None or self.request.sampling.logprobs is not None

    @cached_property
    def ends_early(self) -> bool:
        """Whether more than a token may end its answer: what its text says, or its grammar."""
        return bool(self.request.sampling.stop) or self.grammar is not None

    @cached_property
    def alike(self) -> Hashable:
        """What its processors depend on beside the text; equal for rows whose logits can be processed together."""
        if self.processors is None:
            return None
        return replace(self.request.sampling, seed=0) if self.processors.join else id(self)

    @cached_property
    def text_counts(self) -> TokenCounts:
        """The tokens of prompt and answer."""
        return TokenCounts(self.tokens, 0)

    @cached_property
    def answer_counts(self) -> TokenCounts:
        """The tokens of the answer."""
        return TokenCounts(self.tokens, self.prompt_tokens)

    @property
    def ready(self) -> bool:
        """Whether all but the last token are computed, so that the next forward generates."""
        return self.computed == len(self.tokens) - 1

    def record(self, item: ScheduledRequest, at: int, count: int, accepted: int) -> None:
        """Record a step for the statistics: `count` tokens from the answer's token `at` on, `accepted` of the draft."""
        drafted = len(item.draft.token_ids)
        if drafted or self.copies.runs:
            first = self.prompt_tokens + at
            self.copies.note(at, item.draft, self.tokens[first : first + count])
        if item.logprobs:
            self.logprobs += item.logprobs[:count]
        self.spec.record(drafted, accepted)
        if accepted:
            self.guessed += b"\1" * accepted
        if count > accepted:
            self.guessed += b"\0" * (count - accepted)
        if self.request.hear is not None:
            answer = self.tokens[self.prompt_tokens : self.prompt_tokens + at + count]
            self.request.hear(answer[: self.copies.settled(len(answer))], self.copies.worth_citing(answer))

    def outcome(self) -> Generation | Failure:
        """Return the finished answer, or what failed."""
        problem = self.problem or (self.grammar.problem if self.grammar is not None else "")
        if problem:
            return Failure(self.request.index, problem, "RecordError")
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
    """Return the mean number of tokens of the rows."""
    return sum(len(row.tokens) for row in rows) // max(1, len(rows))


# -- cache rows ------------------------------------------------------------------------------------


class CacheRow:
    """A slot of the cache, and the tokens whose keys and values it holds: its request's, or the previous one's."""

    __slots__ = ("_text", "_text_of", "group", "left", "left_base", "row")

    def __init__(self) -> None:
        self.row: RequestState | None = None
        self._text = array("i")  # of its request, as far as it was asked for
        self._text_of: RequestState | None = None
        self.left = array("i")
        self.left_base = 0
        self.group = -1

    @property
    def base(self) -> int:
        """The base of its request, or of the previous one (RequestState.base)."""
        return self.row.base if self.row else self.left_base

    def leave(self) -> None:
        """Free the slot; its keys and values stay until another request needs it."""
        assert self.row is not None
        self.left, self.left_base = array("i", self.row.tokens[: self.row.computed]), self.row.base
        self.row = None

    def offers(self, tokens: array[int]) -> tuple[int, int]:
        """Return how many of the leading `tokens` it holds now, and how many it will."""
        if self.row is None:
            held = shared(tokens, self.left)
            return held, held
        if self._text_of is not self.row:
            self._text, self._text_of = array("i"), self.row
        self._text.extend(self.row.tokens[len(self._text) :])
        coming = shared(tokens, self._text)
        return min(coming, self.row.computed), coming


@dataclass(frozen=True, slots=True)
class Start:
    """`row` starts in its slot with the first `tokens` tokens of slot `donor`, which may be its own."""

    row: RequestState
    donor: int
    tokens: int


# -- one step --------------------------------------------------------------------------------------


@dataclass(slots=True)
class ScheduledRequest:
    """What one request does in a step: verify a draft after its last token (decodes), or compute a chunk of its text.

    start: position of the first of `token_ids`. writes: whether the last of these is the row's last, so that a token is
    generated. again: whether they are an answer's tokens that are computed once more, as they were. overflowed: whether
    logits of theirs are not numbers. logprobs: of the generated tokens, if requested.
    """

    row: RequestState
    start: int
    token_ids: list[int]
    draft: Draft = field(default_factory=Draft)
    decodes: bool = False
    writes: bool = True
    again: bool = False
    overflowed: bool = False
    logprobs: Sequence[TokenLogprob] = ()

    @property
    def wanted(self) -> int:
        """Number of its last tokens whose logits are needed."""
        return 1 + len(self.draft.token_ids) if self.writes else 0

    @property
    def segment(self) -> Segment:
        """Where its tokens go in the forward."""
        alone = not (self.decodes or self.again)
        return Segment(self.row.place, self.start, len(self.token_ids), alone, self.row.base)

    @property
    def slots(self) -> int:
        """Cache slots (token positions) that its row needs."""
        return self.start + len(self.token_ids)


def without_draft(item: ScheduledRequest) -> ScheduledRequest:
    """Return what a request that decodes does in a step if it has no draft."""
    return replace(item, token_ids=item.token_ids[:1], draft=Draft())
