"""What flows through the pipeline: Record -> Request -> Generation or Failure.

Standard library only. Past `Request` there are only token ids: no runner knows about templates or JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from ragspec.stats import SpecStats


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrieved text. `id` is its 1-based position where the input gave none."""

    id: str
    text: str
    title: str | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One input line. One of `query` (with `contexts`), `messages` and `prompt` becomes the prompt.

    messages: {"role", "content"} and what else a chat template may look at. prompt: a text, or the model's token ids.
    prompts: several of these in one record, each with answers of its own. raw: the prompt is continued as it is,
    without chat template and system prompt. template_args: what the chat template is called with (tools, documents,
    enable_thinking, ...), over the config's. echo: the output begins with the prompt. special_tokens: whether the
    tokenizer's own are put around a raw prompt. reasoning: whether the output tells what the model thought.
    """

    id: str
    query: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    contexts: tuple[Passage, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)  # this record's own settings, over the config's
    metadata: dict[str, Any] = field(default_factory=dict)
    model: str | None = None  # that it asks for by name
    raw: bool = False
    order: tuple[int, ...] | None = None  # places of `contexts`, as the prompt has them; None: as they come
    structured: dict[str, Any] | None = None  # what its answer is to look like, over the config's; {} for anything
    template_args: dict[str, Any] = field(default_factory=dict)
    echo: bool = False
    special_tokens: bool = True
    reasoning: bool = True


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0  # before that many, nothing ends an answer
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # taken off the score of every token that the answer has already
    frequency_penalty: float = 0.0  # the same, once for every time that it has it
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its score)
    logprobs: int | None = None  # how many of the likeliest tokens are told at every place; None: nothing is
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # beside the model's end tokens
    ignore_eos: bool = False  # the model's end tokens end nothing
    seed: int = 0

    def ends(self, eos: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end an answer. eos: the model's own."""
        return (frozenset() if self.ignore_eos else eos) | frozenset(self.stop_token_ids)


def record_seed(seed: int, record_id: str) -> int:
    """Return a seed of this record's own, so that its answer does not depend on the records before it."""
    return int.from_bytes(blake2b(f"{seed}:{record_id}".encode(), digest_size=8).digest()) >> 1


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks what it thinks before it answers: by these words, by their tokens where they have their own.

    ends: tokens that end a thought, before the closing marker. inside: whether the prompt has opened it already.
    """

    opening: str
    closing: str
    opening_ids: tuple[int, ...] = ()
    closing_ids: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    inside: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """What a runner sees. `index` counts the records of this run and names the answer.

    grammar: that the answer must be of (structured/form.py), "" where it may be anything. thinking: what may come
    before the answer, where no stop string counts.
    """

    index: int
    id: str
    token_ids: list[int]
    sampling: Sampling
    passages: tuple[tuple[int, int], ...] = ()  # where the contexts stand in token_ids: (start, end)
    grammar: str = ""
    thinking: Thinking | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the target found a token of an answer, before penalties, bias and temperature: natural logarithms.

    likeliest: (token id, its logarithm), the likeliest first, as many as were asked for.
    """

    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Copied:
    """Tokens `start` to `end` of an answer, copied from passage number `passage`, from prompt token `source` on."""

    start: int
    end: int
    passage: int
    source: int


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer. `token_ids` end with the end-of-sequence token if the model wrote one; they hold no prompt."""

    index: int
    token_ids: list[int]
    finish_reason: str  # stop | length
    spec: SpecStats
    latency_s: float
    time_to_first_token_s: float | None = None
    cached_prompt_tokens: int = 0
    guessed: bytes = b""  # a 1 per token that a draft had guessed, a 0 per one that the target added; empty: not known
    copied: tuple[Copied, ...] = ()  # what accepted drafts took from the prompt's passages
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, where the request's sampling asks for them
    undrafted: str = ""  # why nothing was drafted for it, where its own settings forbid it


@dataclass(frozen=True, slots=True)
class Failure:
    """The runner could not answer this request; the message becomes its error line."""

    index: int
    message: str
    kind: str = "BackendError"


Spans = Sequence[tuple[int, int]]  # (start, end) each


class Controls(Protocol):
    """The words that a tokenizer reads as control tokens, and where they stand in a text."""

    words: frozenset[str]  # their normal forms too, where the tokenizer normalises

    def normal(self, text: str) -> str: ...

    def found(self, text: str) -> list[str]: ...

    def apart(self, text: str) -> str: ...


class Tokenizer(Protocol):
    """What the pipeline needs of a tokenizer. own: where control tokens stand in a text, all else being text."""

    has_chat_template: bool
    thinking: Thinking | None

    @property
    def width(self) -> int:
        """How many tokens the model embeds."""

    @property
    def size(self) -> int:
        """How many tokens it has."""

    @property
    def bos(self) -> int | None:
        """The begin-of-sequence token, None where it puts none before texts."""

    @property
    def controls(self) -> Controls | None:
        """Its control words, None where it has none."""

    def encode(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[int]: ...

    def control_ids(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[int]: ...

    def control_spans(self, text: str, *, special_tokens: bool) -> Spans | None: ...

    def decode(self, token_ids: list[int]) -> str: ...

    def piece(self, token_id: int) -> str: ...

    def offsets(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[tuple[int, int]] | None: ...

    def render_chat(self, messages: list[dict[str, Any]], **args: Any) -> str: ...
