"""Grammars through llguidance: whether a text is complete, and which tokens may follow in an answer.

    >>> is_complete('start: "no" | "nothing"', "no"), is_complete('start: "no" | "nothing"', "not")
    (True, False)

Source: llguidance 1.7, which vLLM uses as well. Limits: fast tokenizers only. Most grammars compile in a millisecond;
llguidance's own limits refuse a grammar that is too large or whose masks take too long.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Sequence
from functools import lru_cache
from typing import Any

from ragspec.errors import ConfigError, RecordError, flat

KEPT = 256  # cached compiled grammars
STUCK = (
    "structured: the model ended the answer before its form was complete, because other settings (suppress_tokens, "
    "bad_words_ids, no_repeat_ngram_size, ...) exclude all that may follow in it"
)
EXCLUDED = (
    "structured: other settings (suppress_tokens, begin_suppress_tokens, ...) exclude all that may "
    "follow in the answer's form"
)


def is_complete(grammar: str, text: str) -> bool:
    """Return whether the grammar accepts `text` as a complete answer.

    The text is parsed as bytes, without a tokenizer. A grammar with special tokens accepts no text.
    """
    matcher = compiled(grammar).deep_copy()
    tokens = list(text.encode(errors="replace"))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def spaced(value: Any) -> str:
    """Return a JSON value spaced as grammars space it (form.py)."""
    return json.dumps(value, ensure_ascii=False)


@lru_cache(maxsize=KEPT)
def compiled(grammar: str) -> Any:
    """Return a grammar's byte-level matcher before an answer. Cached: copy it before use."""
    from llguidance import LLMatcher

    return LLMatcher(_bytes(), LLMatcher.grammar_from_lark(grammar), log_level=0)


@lru_cache(maxsize=1)
def _bytes() -> Any:
    """Return llguidance's byte tokenizer."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


# -- grammars of a tokenizer -----------------------------------------------------------------------


SHOWN = 300  # characters of a message
ENDLESS = 20_000  # bytes that a grammar may force in excess of its own length
WHERE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")  # a location in our generated grammar
RANGE = re.compile(r"Failed to generate regex for \w+ range")


@lru_cache(maxsize=KEPT)
def problem_of(grammar: str) -> str:
    """Return why a grammar is unusable, "" if it is not, as far as that shows without the model's tokenizer."""
    from llguidance import LLMatcher

    return _summary(LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))) or _problem_in_bytes(grammar)


def _problem_in_bytes(grammar: str) -> str:
    """Return why no answer could begin or end, "" otherwise and for grammars that name tokens of a model."""
    matcher = compiled(grammar).deep_copy()
    if matcher.is_error():
        return ""
    matcher.compute_bitmask()
    if matcher.is_error():
        return _summary(matcher.get_error())
    forced = len(matcher.compute_ff_tokens())
    if forced > len(grammar) + ENDLESS:
        return f"no answer would end: its first {forced:,} bytes follow from it (a schema that requires itself?)"
    return ""


class Grammars:
    """Compiled grammars of one tokenizer.

        >>> grammars = Grammars(tokenizer, width=49152, eos={2})
        >>> matcher = grammars.matcher('start: "yes" | "no"')
        >>> matcher.admitted([token_of_yes, 2]), matcher.forced([token_of_yes])
        (2, [2])

    Args:
        tokenizer: a fast tokenizer of transformers.
        width: of the model's logits.
        eos: ids that end an answer.

    Raises:
        ConfigError: llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, width: int, eos: Collection[int]) -> None:
        from llguidance.hf import from_tokenizer

        self.eos = frozenset(eos)
        self.width = max(width, len(tokenizer))
        try:
            self._tokenizer = from_tokenizer(tokenizer, self.width, eos_token=sorted(eos) or None)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"structured: the model's tokenizer cannot be used with grammars ({flat(error, SHOWN)}); choose "
                "another model, or leave the section out"
            ) from error
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def matcher(self, grammar: str) -> Matcher:
        """Return a Matcher at the start of an answer. Raises RecordError for an unusable grammar."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        return Matcher(found.deep_copy(), self.eos, self.width)

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        limits = LLParserLimits(verbose_errors=False)
        found = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)
        mask = allocate_token_bitmask(1, self.width)
        if not found.is_error():
            fill_next_token_bitmask(found, mask)
        if found.is_error():
            raise RecordError(f"structured: {_summary(found.get_error())}")
        if not mask.any():
            raise RecordError("structured: the grammar admits no answer at all")
        return found


def begin(grammars: Callable[[], Grammars] | None, grammar: str) -> Matcher | None:
    """Return a Matcher at the start of an answer, None if `grammar` is "". Raises RecordError.

    grammars: returns the Grammars of the model's tokenizer; may raise ConfigError.
    """
    if not grammar:
        return None
    if grammars is None:
        raise RecordError("structured: grammars need a tokenizer, and there is none")
    try:
        return grammars().matcher(grammar)
    except ConfigError as error:
        raise RecordError(str(error)) from None


class Matcher:
    """The state of one answer in its grammar. Tokens are those of the Grammars that made it."""

    def __init__(self, inner: Any, eos: frozenset[int], width: int) -> None:
        self.inner = inner
        self.width = width  # tokens in a mask
        self._eos = eos
        self._end = next(iter(eos)) if len(eos) == 1 else None
        self.ended = False  # whether an eos token was taken
        self.stuck = False  # whether one was taken where the grammar allows none
        self._excluded = False  # whether another token was written that the grammar does not allow

    @property
    def problem(self) -> str:
        """Return why the answer cannot continue, or should not have ended, "" if all is well."""
        if self.stuck:
            return STUCK
        if self._excluded:
            return EXCLUDED
        return f"structured: {_summary(self.inner.get_error())}" if self.inner.is_error() else ""

    @property
    def endless(self) -> bool:
        """Whether no end token ends an answer, which is over then when only an end may follow."""
        return not self._eos

    @property
    def complete(self) -> bool:
        """Return whether only an end may follow."""
        return bool(self.inner.is_stopped())

    def copy(self) -> Matcher:
        """Return a copy in the same state."""
        return Matcher(self.inner.deep_copy(), self._eos, self.width)

    def take(self, tokens: Sequence[int]) -> None:
        """Advance by written tokens; sets `problem` if one was not allowed."""
        for token in tokens:
            if token in self._eos:
                self.ended = True  # llguidance's rollback would lose it
                self.stuck = not (self.inner.is_error() or self.complete or self.inner.is_accepting())
            elif not self.inner.try_consume_tokens([token]):
                self._excluded = not self.inner.is_error()
                return

    def until_complete(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens are taken before only an end may follow: all of them if more may."""
        inner = self.inner.deep_copy()
        for count, token in enumerate(tokens, 1):
            if not inner.consume_token(token) or inner.is_stopped():
                return count
        return len(tokens)

    def completes(self, answer: Sequence[int]) -> bool:
        """Return whether a whole answer reaches a place where only an end may follow. Call at the answer's start."""
        then = self.copy()
        then.take(answer[: self.until_complete(answer)])
        return then.complete

    def admitted(self, guesses: Sequence[int]) -> int:
        """Return how many leading guesses are allowed; none after an end."""
        if self.complete:  # llguidance does not count an end in this state
            return int(not self.problem and guesses[:1] != [] and guesses[0] in self._eos)
        count = int(self.inner.validate_tokens(list(guesses)))
        end = next((at for at, token in enumerate(guesses) if token in self._eos), count)
        return min(count, end + 1)

    def forced(self, guesses: Sequence[int] = (), *, end: bool = True) -> list[int]:
        """Return the tokens that must follow `guesses`, which must all be allowed.

        end: include the eos token if it must follow and there is only one. The bytes are certain; a model may split
        them into other tokens.
        """
        if any(token in self._eos for token in guesses):
            return []
        inner = self.inner
        taken = inner.try_consume_tokens(list(guesses))
        found = list(inner.compute_ff_tokens())
        taken += inner.try_consume_tokens(found)
        if end and self._end is not None and inner.is_stopped() and not inner.is_error():
            found.append(self._end)
        if taken:
            inner.rollback(taken)
        return found

    def walk(self, guesses: Sequence[int]) -> Generator[int, None, None]:
        """Advance through the guesses one by one, yielding how many are taken (from 0), and roll back at the end.

        Close the generator to stop early.
        """
        taken = 0
        try:
            for at, guess in enumerate((*guesses, None)):
                yield at
                if guess is None or guess in self._eos or not self.inner.try_consume_tokens([guess]):
                    return
                taken += 1
        finally:
            if taken:
                self.inner.rollback(taken)

    def admits(self, token: int) -> bool | None:
        """Return whether a token may follow; None if only a mask can tell.

        That is the case where the next bytes are certain: a mask allows one tokenization of them, a matcher any.
        """
        return None if self.inner.compute_ff_bytes() else self.admitted([token]) == 1

    def mask(self, guesses: Sequence[int] = ()) -> Any:
        """Return the tokens that may follow `guesses`, int32 (1, width / 32), one bit per token, lowest first.

        Returns None if not all guesses are allowed or one ends the answer.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        if any(token in self._eos for token in guesses):
            return None
        taken = self.inner.try_consume_tokens(list(guesses))
        bits = allocate_token_bitmask(1, self.width) if taken == len(guesses) else None
        if bits is not None:
            fill_next_token_bitmask(self.inner, bits)
        if taken:
            self.inner.rollback(taken)
        return bits

    def before_end(self, guesses: Sequence[int]) -> list[int]:
        """Return the guesses before an end, which a mask can follow."""
        end = next((at for at, token in enumerate(guesses) if token in self._eos), len(guesses))
        return list(guesses[:end])


def _summary(error: str) -> str:
    """Return the first meaningful line of llguidance's message, with its `error:` lines."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    first = " ".join(lines[:1] + [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")])
    if RANGE.search(first):
        return "$.minimum or $.maximum: has more digits than a grammar can hold; leave it out"
    if first.startswith("panic:") or (first and " " not in first):  # internal messages
        first = f"llguidance cannot compile it (most often, it is too large or refers to itself): {first}"
    return WHERE.sub("", first)[:SHOWN]
