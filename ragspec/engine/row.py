"""A record while the engine answers it.

The life of a row, and who moves it on:

    waiting   a request in the queue, read ahead, grouped by prefix; no Row yet          Admission._look_ahead
    admitted  it has a Row, a place in the cache and the prefix another place computed   Admission.admit, Engine._begin
    filling   a piece of its text is computed in each step, without drafts               Engine._plan (not `ready`)
    ready     all but its last token are computed: each step verifies a draft behind     Engine._plan (`ready`)
              that token and writes one token at least
    finished  its answer has ended: the place is free, the outcome is handed on          Engine._commit

A row may go back. One that outgrows the length its model restarts at is filled anew where it is (Engine._extend).
When a forward fails, or memory is short, all rows are sent back to the head of the queue: they keep what they wrote,
lose their places and what was computed, and are admitted again (Retreat, Admission.interrupt).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragspec.engine.sampling import Noise
from ragspec.models.generation import Processors
from ragspec.records import Failure, Generation, Request, TokenLogprob
from ragspec.speculation.citations import Copies
from ragspec.stats import SpecStats
from ragspec.structured.grammars import Matcher


@dataclass(slots=True)
class Row:
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
    copies: Copies = field(init=False)

    def __post_init__(self) -> None:
        self.base = len(self.request.token_ids)
        self.copies = Copies(self.request.token_ids, self.request.passages)

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


def reach_of(rows: Sequence[Row]) -> int:
    """Return how many tokens the rows have, on average."""
    return sum(len(row.tokens) for row in rows) // max(1, len(rows))
