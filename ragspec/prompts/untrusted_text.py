"""Text from records (queries, passages, messages, metadata) in prompts, without control tokens.

A passage that contains `<|im_end|>` could end the user's turn. A prompt whose only control words are the templates' is
encoded as it is. Any other is rendered again with the characters of control words masked, which leaves only the
templates' own. An encoding is used only if it yields exactly these control tokens. Limit: text that merely looks like a
turn, without being a control token, stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragspec.errors import RecordError
from ragspec.records import Controls, Passage, Record, Spans, Tokenizer

MASK = 0xF0000  # first private Unicode character used as a mask
Write = Callable[[Record, tuple[Passage, ...]], tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt's text. own: spans that may hold control tokens, the rest being text; None: the entire text."""

    text: str
    special_tokens: bool  # whether the tokenizer adds its special tokens
    own: Spans | None = None


def as_text(
    record: Record, contexts: tuple[Passage, ...], written: PromptText, write: Write, tokenizer: Tokenizer
) -> PromptText:
    """Return the prompt with the control tokens of the templates and none of the record's.

    written: the prompt as rendered. write: renders a record with contexts. Raises RecordError if no encoding works.
    """
    controls = tokenizer.controls
    assert controls is not None
    mask = ControlMask(controls)
    masked, special_tokens = write(*mapped(record, contexts, mask.hide, mask.hide_key))
    wanted = controls.found(masked)
    if controls.found(written.text) == wanted:
        return written
    expected = tokenizer.control_ids(masked, special_tokens=special_tokens)
    ways = [PromptText(*write(*mapped(record, contexts, controls.apart, controls.apart)))]  # a space inside each word
    own = tokenizer.control_spans(masked, special_tokens=special_tokens)
    if own is not None and mask.show(masked) == written.text:  # else a template depends on masked characters
        ways.insert(0, replace(written, own=own))
    for way in ways:
        if tokenizer.control_ids(way.text, special_tokens=way.special_tokens, own=way.own) == expected:
            return way
    word = next((Counter(controls.found(written.text)) - Counter(wanted)).elements(), "a control word")
    raise RecordError(
        f'the record contains "{word}", which the model would read as a control token; remove it, or set '
        "prompt.allow_special_tokens: true if that is intended"
    )


class ControlMask:
    """Replaces every character that distinguishes control words, letters excepted, with a private one."""

    def __init__(self, controls: Controls) -> None:
        self._controls = controls
        self._marks = frozenset(char for word in controls.words for char in _marks_of(word))
        self._hidden: dict[int, int] = {}  # code point -> mask
        self._shown: dict[int, int] = {}  # mask -> code point

    def hide(self, text: str) -> str:
        """Return `text` masked, with the same length."""
        for char in set(text):
            if ord(char) not in self._hidden and self._is_mark(char):
                place = MASK + len(self._hidden)
                self._hidden[ord(char)], self._shown[place] = place, ord(char)
        return text.translate(self._hidden)

    def hide_key(self, key: str) -> str:
        """Return a metadata key, masked only if it contains a control word: templates look keys up by name."""
        return self.hide(key) if self._controls.found(key) else key

    def show(self, text: str) -> str:
        """Return masked `text` restored."""
        return text.translate(self._shown)

    def _is_mark(self, char: str) -> bool:
        return char in self._marks or not self._marks.isdisjoint(self._controls.normal(char))


def _marks_of(word: str) -> str:
    """Return the characters that distinguish a control word; templates compare words, not these characters."""
    return "".join(char for char in word if not (char.isalnum() or char.isspace() or char in "_-")) or word[0]


def mapped(
    record: Record, contexts: Sequence[Passage], change: Callable[[str], str], change_key: Callable[[str], str]
) -> tuple[Record, tuple[Passage, ...]]:
    """Return `record` and `contexts` with every text in them changed, except the roles of messages."""

    def optional(text: str | None) -> str | None:
        return None if text is None else change(text)

    def nested(value: Any) -> Any:
        if isinstance(value, dict):
            return {change_key(key): nested(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [nested(inner) for inner in value]
        return change(value) if isinstance(value, str) else value

    messages = record.messages
    if messages is not None:
        messages = tuple({**nested(message), "role": message["role"]} for message in messages)
    changed = replace(
        record,
        id=change(record.id),
        query=optional(record.query),
        prompt=record.prompt if isinstance(record.prompt, tuple) else optional(record.prompt),
        messages=messages,
        metadata=nested(record.metadata),
        template_args=nested(record.template_args),
    )
    passages = (replace(p, id=change(p.id), text=change(p.text), title=optional(p.title)) for p in contexts)
    return changed, tuple(passages)
