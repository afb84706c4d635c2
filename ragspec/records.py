"""The data that flows through the pipeline: Record -> Request -> Generation or Failure.

Standard library only. A Request holds only token ids: runners know nothing of templates or JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from ragspec.stats import SpecStats


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrieved text. `id` defaults to its 1-based position."""

    id: str
    text: str
    title: str | None = None
    score: float | None = None

    def __str__(self) -> str:
        """Return the text, as a template expects that writes a passage itself."""
        return self.text


@dataclass(frozen=True, slots=True)
class Record:
    """One input record. Exactly one of `query` (with `contexts`), `messages` and `prompt` becomes the prompt.

    Attributes:
        messages: objects with "role", "content" and any other key that a chat template reads.
        prompt: a text, or the model's token ids.
        prompts: several such prompts in one record; each is answered separately.
        raw: use the prompt as it is, without chat template and system prompt.
        template_args: arguments of the chat template (tools, documents, enable_thinking, ...); override the config's.
        echo: begin the output with the prompt.
        special_tokens: add the tokenizer's special tokens to a raw prompt.
        reasoning: include the model's reasoning in the output.
    """

    id: str
    query: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    contexts: tuple[Passage, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)  # overrides the config's
    metadata: dict[str, Any] = field(default_factory=dict)
    model: str | None = None  # the model name that the record asks for
    raw: bool = False
    order: tuple[int, ...] | None = None  # the order of `contexts` in the prompt, as indices; None: as given
    structured: dict[str, Any] | None = None  # the answer's required form; overrides the config's; {}: free text
    template_args: dict[str, Any] = field(default_factory=dict)
    echo: bool = False
    special_tokens: bool = True
    reasoning: bool = True


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0  # no end token or stop string ends an answer before this many
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from the score of every token that the answer already contains
    frequency_penalty: float = 0.0  # the same, times how often the answer contains it
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its score)
    logprobs: int | None = None  # how many of the likeliest tokens to report per position; None: no logprobs
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's end tokens
    ignore_eos: bool = False  # continue past the model's end tokens
    seed: int = 0

    def ends(self, eos: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end an answer. eos: the model's end tokens."""
        return (frozenset() if self.ignore_eos else eos) | frozenset(self.stop_token_ids)


def record_seed(seed: int, record_id: str) -> int:
    """Return the record's own seed, so that its answer does not depend on the records before it."""
    return int.from_bytes(blake2b(f"{seed}:{record_id}".encode(), digest_size=8).digest()) >> 1


@dataclass(frozen=True, slots=True)
class Thinking:
    """The markers around a model's reasoning: their text, and their token ids where they are single tokens.

    ends: tokens that end the reasoning before the closing marker. inside: the prompt already opened it.
    """

    opening: str
    closing: str
    opening_ids: tuple[int, ...] = ()
    closing_ids: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    inside: bool = False


@dataclass(slots=True)
class Copied:
    """Tokens `start` to `end` of an answer, copied from passage number `passage`, starting at prompt token `source`."""

    start: int
    end: int
    passage: int
    source: int


Hear = Callable[[Sequence[int], tuple[Copied, ...]], None]  # an answer's tokens so far, and what they copied


@dataclass(frozen=True, slots=True)
class Request:
    """One unit of work for a runner. `index` counts the requests of a run and identifies the answer.

    grammar: the grammar that the answer must match (structured/form.py), "" for free text. thinking: markers of the
    reasoning that may precede the answer; stop strings do not apply inside it. hear: called as the answer grows, by
    runners that can (ragspec's engine), with tokens of which it is known whether they were copied.
    """

    index: int
    id: str
    token_ids: list[int]
    sampling: Sampling
    passages: tuple[tuple[int, int], ...] = ()  # (start, end) of each context in token_ids
    grammar: str = ""
    thinking: Thinking | None = None
    hear: Hear | None = None

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of prompt and answer."""
        return len(self.token_ids) + self.sampling.max_new_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of an answer's token under the target, before penalties, bias and temperature.

    likeliest: (token id, logprob) of as many tokens as requested, the likeliest first.
    """

    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer. `token_ids` include the end-of-sequence token if the model wrote one, and no prompt tokens."""

    index: int
    token_ids: list[int]
    finish_reason: str  # stop | length
    spec: SpecStats
    latency_s: float
    time_to_first_token_s: float | None = None
    cached_prompt_tokens: int = 0
    guessed: bytes = b""  # 1 per drafted token, 0 per token that the target added; empty: unknown
    copied: tuple[Copied, ...] = ()  # spans that accepted drafts copied from the prompt's passages
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if the sampling requests them
    undrafted: str = ""  # why nothing was drafted, if the request's settings forbid drafts


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that the runner could not answer; the message becomes its error line."""

    index: int
    message: str
    kind: str = "BackendError"


Spans = Sequence[tuple[int, int]]  # (start, end) each


class Controls(Protocol):
    """The words that a tokenizer reads as control tokens, and where they occur in a text."""

    words: frozenset[str]  # including their normalised forms, if the tokenizer normalises

    def normal(self, text: str) -> str:
        """Return `text` as the tokenizer normalises it."""

    def found(self, text: str) -> list[str]:
        """Return the control words in `text`, in order."""

    def apart(self, text: str) -> str:
        """Return `text` with a space inside each control word, which makes it text."""


class Tokenizer(Protocol):
    """What the pipeline needs of a tokenizer. own: spans of a text that may hold control tokens; the rest is text."""

    has_chat_template: bool
    thinking: Thinking | None
    ends: frozenset[int]  # the model's end tokens, as far as they are known

    @property
    def width(self) -> int:
        """Return how many tokens the model embeds."""

    @property
    def size(self) -> int:
        """Return how many tokens the vocabulary has."""

    @property
    def bos(self) -> int | None:
        """Return the begin-of-sequence token, None if the tokenizer adds none."""

    @property
    def controls(self) -> Controls | None:
        """Return the control words, None if there are none."""

    def encode(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[int]:
        """Return the token ids of `text`. special_tokens: add the tokenizer's own around it."""

    def control_ids(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[int]:
        """Return the control tokens in encode()'s result, in order."""

    def control_spans(self, text: str, *, special_tokens: bool) -> Spans | None:
        """Return the spans of encode()'s control tokens in `text`, None if they cannot be located."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids` without special tokens."""

    def piece(self, token_id: int) -> str:
        """Return the text of one token, including a control token's name."""

    def piece_bytes(self, token_id: int) -> bytes:
        """Return the bytes of piece(), exact also where the token is part of a character."""

    def offsets(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[tuple[int, int]] | None:
        """Return the span in `text` of each token, None if the tokenizer has no offsets."""

    def render_chat(self, messages: list[dict[str, Any]], **args: Any) -> str:
        """Return the chat in the model's template. args: variables of the template."""
