"""Build a record's prompt as token ids within a token budget.

The user message comes from a sandboxed Jinja2 template, the whole from the model's chat template if it has one. When
contexts do not fit, whole passages are dropped, the lowest-ranked first.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ragspec.config.redaction import revealed
from ragspec.config.sections import PromptConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.models.stopping import thinking_after_prompt
from ragspec.prompts.templates import SYSTEM, Chat, arguments, compiled, uses_contexts
from ragspec.prompts.untrusted_text import PromptText, as_text
from ragspec.records import Passage, Record, Thinking, Tokenizer

log = logging.getLogger(__name__)
ANSWER = 4  # passages leave at most 1/ANSWER of the context for an answer without a given length


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its passages: `kept` in prompt order, `dropped` by rank, the lowest last."""

    token_ids: list[int]
    kept: tuple[Passage, ...]
    dropped: tuple[Passage, ...] = ()
    places: tuple[tuple[int, int], ...] = ()  # (start, end) of `kept` in token_ids; (0, 0) if the template altered one
    thinking: Thinking | None = None  # reasoning that may precede the answer
    written: PromptText | None = None  # what token_ids encode, None if they were given


class PromptBuilder:
    """Builds the prompts of one run. Raises ConfigError for a bad template, RecordError if a prompt does not fit."""

    def __init__(self, config: PromptConfig, tokenizer: Tokenizer, context_length: int | None) -> None:
        if config.chat is True and not tokenizer.has_chat_template:
            raise ConfigError("prompt.chat: true, but the model has no chat template; set prompt.chat: auto or false")
        self._config = config
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._chat = tokenizer.has_chat_template if config.chat == "auto" else config.chat
        self._template_of_chat = Chat(tokenizer, revealed(config.chat_template_kwargs)) if self._chat else None
        self._thinking = tokenizer.thinking if config.split_reasoning else None
        # the fake runner's tokenizer has no control words and needs no template
        self._lacks_template = config.chat == "auto" and not self._chat and tokenizer.controls is not None
        self._unformatted = 0  # prompts of messages or queries written without a chat template
        self._without_bos = 0  # token id prompts without a begin-of-sequence token
        self._own_words = lru_cache(maxsize=256)(self._find_own_words)
        self._has_control_words = False  # whether the current record contains control words
        self._with_control_words = 0  # records that contained some
        self._template = compiled(config.template, ranks=config.show_ranks)
        self._shows_passages = config.template is None or uses_contexts(config.template)
        self._unshown = 0  # records whose passages the template does not use
        self._after_answer = 0  # records whose last message is an answer that is not to be continued

    def build(self, record: Record, max_new_tokens: int, *, locate: bool = False, shrinks: bool = False) -> Prompt:
        """Return the prompt of `record`, leaving room for `max_new_tokens`.

        Args:
            record: the record.
            max_new_tokens: the answer's length in tokens.
            locate: also find the token ranges of the passages.
            shrinks: a prompt that is too long may reduce the room, to one token at least.

        Raises:
            RecordError: the prompt is empty, does not fit, or cannot be made.
        """
        self._has_control_words = False
        if record.contexts and not self._shows_passages:
            self._unshown += 1
            record = replace(record, contexts=(), order=None)
        self._after_answer += self._ends_with_answer(record)
        prompt = self._build(record, max_new_tokens, shrinks)
        if not prompt.token_ids:
            raise RecordError("the prompt is empty; there is nothing to continue")
        if (highest := max(prompt.token_ids)) >= (width := self._tokenizer.width):
            raise RecordError(
                f'the tokenizer writes token {highest} ("{self._tokenizer.piece(highest)}"), but the model embeds only '
                f"0 to {width - 1}: they do not belong together"
            )
        self._with_control_words += self._has_control_words
        self._unformatted += self._lacks_template and (record.query is not None or record.messages is not None)
        return replace(prompt, places=self._places(prompt)) if locate and prompt.kept else prompt

    def _ends_with_answer(self, record: Record) -> bool:
        """Return whether a record's last message is an answer that the model is not to continue."""
        if not record.messages or record.messages[-1]["role"] != "assistant":
            return False
        return not self._continued_message(record)

    def _continued_message(self, record: Record) -> dict[str, Any] | None:
        """Return the message that the model is to continue, None for a new one."""
        if not record.messages:
            return None
        given = arguments(record.messages, self._config.chat_template_kwargs, record.template_args)
        return record.messages[-1] if given.get("continue_final_message") else None

    def room(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Return how many of `max_new_tokens` fit after a prompt."""
        length = self._context_length
        return max_new_tokens if length is None else max(1, min(max_new_tokens, length - prompt_tokens))

    def _build(self, record: Record, max_new_tokens: int, shrinks: bool) -> Prompt:
        if shrinks and self._context_length is not None:  # limits what is reserved while passages are fitted
            max_new_tokens = min(max_new_tokens, self._context_length // ANSWER)
        limit, why = self._limit(max_new_tokens)
        if not record.contexts:
            prompt = self._encoded(record, (), ())
            length = len(prompt.token_ids)
            if length > limit and shrinks:
                limit, why = self._limit(1)
            if length > limit:
                raise RecordError(f"the prompt has {length} tokens, {why}")
            return prompt
        ranked, most = rank(record.contexts), self._config.max_passages or len(record.contexts)
        prompt = self._with_best(record, ranked, most)
        if len(prompt.token_ids) <= limit:
            return prompt
        return self._fit(record, ranked, most, limit, self._limit(1) if shrinks else (limit, why))

    def _with_best(self, record: Record, ranked: list[int], count: int) -> Prompt:
        """Return the prompt with the `count` highest-ranked passages."""
        kept = tuple(record.contexts[i] for i in _arranged(self._order(record), ranked[:count]))
        return self._encoded(record, kept, tuple(record.contexts[i] for i in ranked[count:]))

    def _order(self, record: Record) -> Sequence[int]:
        """Return the order of a record's passages in the prompt, as indices."""
        if record.order is not None:
            return record.order
        return canonical(record.contexts) if self._config.order == "canonical" else range(len(record.contexts))

    def _fit(self, record: Record, ranked: list[int], most: int, limit: int, last: tuple[int, str]) -> Prompt:
        """Return the prompt with as many of the highest-ranked passages as fit, fewer than `most`, by bisection.

        last: the limit of a prompt without passages, and its reason.
        """
        best, low, high = self._with_best(record, ranked, 0), 0, min(most, len(ranked)) - 1
        if len(best.token_ids) > last[0]:
            raise RecordError(f"the prompt has {len(best.token_ids)} tokens even without its contexts, {last[1]}")
        while low < high:
            middle = (low + high + 1) // 2
            prompt = self._with_best(record, ranked, middle)
            if len(prompt.token_ids) <= limit:
                low, best = middle, prompt
            else:
                high = middle - 1
        return best

    def _limit(self, max_new_tokens: int) -> tuple[int, str]:
        """Return the maximum prompt tokens, and for a message the reason and what to do."""
        limit = self._config.max_prompt_tokens or 0
        why = f"over max_prompt_tokens ({limit}); shorten it or raise prompt.max_prompt_tokens"
        if self._context_length is not None:
            room = self._context_length - max_new_tokens
            if not limit or room < limit:
                limit = room
                why = f"over the model's {self._context_length} less max_new_tokens ({max_new_tokens}); shorten it"
                why += " or lower max_new_tokens" if max_new_tokens > 1 else ""
        elif not limit:
            return 1 << 62, ""
        return limit, why

    def _places(self, prompt: Prompt) -> tuple[tuple[int, int], ...]:
        """Return the tokens that lie entirely inside each kept passage."""
        written = prompt.written
        assert written is not None  # as for every prompt that keeps passages
        text = written.text
        offsets = self._tokenizer.offsets(text, special_tokens=written.special_tokens, own=written.own)
        if offsets is None or len(offsets) != len(prompt.token_ids):
            return ()
        ends = [end for _, end in offsets]
        places = []
        for passage in prompt.kept:
            start = text.find(passage.text)
            first = bisect_left(ends, start + 1)  # the token that contains the first character
            last = bisect_left(ends, start + len(passage.text) + 1)
            places.append((first, last) if start >= 0 and first < last else (0, 0))
        return tuple(places)

    def _encoded(self, record: Record, kept: tuple[Passage, ...], dropped: tuple[Passage, ...]) -> Prompt:
        """Return the prompt with these passages."""
        if isinstance(record.prompt, tuple):
            if (highest := max(record.prompt)) >= self._tokenizer.size:
                raise RecordError(f'"prompt": the model has no token {highest}, only 0 to {self._tokenizer.size - 1}')
            self._without_bos += self._tokenizer.bos not in (None, record.prompt[0])
            return Prompt(list(record.prompt), ())
        written = self._compose(record, kept)
        ids = self._tokenizer.encode(written.text, special_tokens=written.special_tokens, own=written.own)
        thinking = None
        if self._thinking is not None and not record.raw:
            continued = self._continued_message(record)
            begun = str(continued["content"]) if continued else ""
            thinking = thinking_after_prompt(self._thinking, written.text, begun)
        return Prompt(ids, kept, dropped, thinking=thinking, written=written)

    def _compose(self, record: Record, contexts: tuple[Passage, ...]) -> PromptText:
        """Return the prompt's text with no control tokens but those of the templates and the system prompt."""
        written = PromptText(*self._write(record, contexts))
        controls = self._tokenizer.controls
        if controls is None or self._config.allow_special_tokens:
            return written
        roles = tuple(message["role"] for message in record.messages or ({"role": "user"},))
        if not record.template_args and controls.found(written.text) == self._own_words(roles):
            return written
        guarded = as_text(record, contexts, written, self._write, self._tokenizer)
        self._has_control_words |= guarded is not written
        return guarded

    def _find_own_words(self, roles: tuple[str, ...]) -> list[str] | None:
        """Return the control words of a prompt of empty messages with these roles; None if rendering fails."""
        controls = self._tokenizer.controls
        assert controls is not None
        if bad := [role for role in roles if controls.found(role)]:
            raise RecordError(f'"messages": the role "{bad[0]}" contains a control word of the model; remove it')
        if not self._chat:
            return controls.found(self._config.system or "")
        try:
            return controls.found(self._render(self._with_system([{"role": r, "content": "x"} for r in roles]), {}))
        except RecordError:
            return None

    def _best_first(self, record: Record, count: int) -> list[int]:
        """Return the prompt positions of `count` passages, the most relevant first; empty without `show_ranks`."""
        if not self._config.show_ranks:
            return []
        ranked = rank(record.contexts)[:count]
        places = {position: place for place, position in enumerate(_arranged(self._order(record), ranked), 1)}
        return [places[position] for position in ranked]

    @property
    def shares(self) -> bool:
        """Return whether passages precede everything specific to a record, so that prompts can share a prefix."""
        passages = tuple(Passage(str(place), f"<passage {place}>") for place in (1, 2))
        try:
            one, other = (
                self._write(Record(name, query=f"{name}?", contexts=passages), passages)[0] for name in ("a", "b")
            )
        except RecordError:  # a template that needs more than these records have
            return True
        end = max(
            (one.rfind(passage.text) + len(passage.text) for passage in passages if passage.text in one), default=0
        )
        return one[:end] == other[:end]

    @property
    def notes(self) -> list[str]:
        """Return notes for the user about the prompts built so far."""
        counted = {
            "records contain control words of the model (such as <|im_end|>); they are encoded as text unless "
            "prompt.allow_special_tokens is true": self._with_control_words,
            "records are queries or messages, and the model has no chat template: they are written as plain "
            "text": self._unformatted,
            "records have passages that prompt.template does not use: write a loop over `contexts` into "
            "it": self._unshown,
            "records end with an assistant message, which is answered rather than continued; "
            "prompt.chat_template_kwargs: {continue_final_message: true} continues it": self._after_answer,
            "prompts of token ids do not begin with the model's begin-of-sequence token": self._without_bos,
        }
        notes = [f"{count} {what}" for what, count in counted.items() if count]
        if self._template_of_chat is not None and self._template_of_chat.folded:
            notes.append("the chat template has no system role: system prompts are put before the first user message")
        return notes

    def _write(self, record: Record, contexts: tuple[Passage, ...]) -> tuple[str, bool]:
        """Return the prompt's text, and whether the tokenizer adds its special tokens."""
        args = record.template_args
        if record.messages is not None and self._chat:
            return self._render(self._with_system(list(record.messages)), args), False  # already in the template
        text = self._text(record, contexts)
        if record.raw:
            return text, record.special_tokens
        if self._chat:
            return self._render(self._with_system([{"role": "user", "content": text}]), args), False
        if self._config.system is not None and not _has_system(record.messages):
            text = f"{self._config.system}\n\n{text}"
        return text, True

    def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        system = self._config.system
        if system is None or _has_system(messages):
            return messages
        return [{"role": "system", "content": system}, *messages]

    def _render(self, messages: list[dict[str, Any]], args: dict[str, Any]) -> str:
        assert self._template_of_chat is not None
        return self._template_of_chat.render(messages, args)

    def _text(self, record: Record, contexts: tuple[Passage, ...]) -> str:
        if record.prompt is not None:
            assert isinstance(record.prompt, str)
            return record.prompt
        if record.messages is not None:
            return "\n\n".join(message["content"] for message in record.messages)
        try:
            text: str = self._template.render(
                query=f"{self._config.query_prefix}{record.query}",
                contexts=contexts,
                best_first=self._best_first(record, len(contexts)),
                system=self._config.system,
                metadata=record.metadata,
                id=record.id,
                chat=self._chat,
            )
            return text
        except Exception as error:  # the user's template may raise anything
            log.debug("the prompt template failed", exc_info=error)
            raise RecordError(f"prompt.template: {type(error).__name__}: {error}") from None


def _has_system(messages: Sequence[dict[str, Any]] | None) -> bool:
    """Return whether messages begin with a system prompt of their own."""
    return messages is not None and messages[0]["role"] in SYSTEM


def canonical(contexts: tuple[Passage, ...]) -> list[int]:
    """Return positions sorted by id, or by text if ids are just positions: equal sets get equal orders."""
    places = {str(place) for place in range(1, len(contexts) + 1)}
    numbered = {passage.id for passage in contexts} == places

    def key(i: int) -> tuple[str, str, str, int]:
        passage = contexts[i]
        return "" if numbered else passage.id, passage.text, passage.title or "", i

    return sorted(range(len(contexts)), key=key)


def rank(contexts: tuple[Passage, ...]) -> list[int]:
    """Return positions, highest rank first: by score if every passage has one, else in their order."""
    positions = range(len(contexts))
    if all(passage.score is not None for passage in contexts):
        return sorted(positions, key=lambda i: -(contexts[i].score or 0.0))
    return list(positions)


def _arranged(order: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return these positions in prompt order."""
    kept = set(positions)
    return [i for i in order if i in kept]
