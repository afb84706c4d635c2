"""Between a target and a draft that have other tokens: what both read and write is text.

    >>> script = Translation(target, draft, ends, end).open(row_tokens)
    >>> script.tokens  # the draft's
    >>> script.guesses(drafted)  # the target's

Text is encoded anew from a little before its end, because tokens merge over any boundary; what is further back is
settled where the two sides of a cut encode to what the whole does. Characters of which a token is missing wait.
Prior art: universal assisted decoding (transformers), which aligns by the longest common run of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ragspec.models.tokenizer import ControlTokens

SETTLED = 96  # characters before the end, up to which text is no longer encoded anew
LONG = 256  # characters that are encoded anew, before some of them are settled
AHEAD = 40  # characters before a guess that are encoded with it
CUTS = 6  # spaces at which a cut is tried
CONTEXT = 8  # tokens that are decoded with what follows them
PARTS = 4  # tokens that a character may be made of, at most
INCOMPLETE = "\ufffd"


class Translation:
    """Two tokenizers. ends: the draft's tokens that end its text. end: what the target writes there, None for nothing.

    target, draft: transformers tokenizers.
    """

    def __init__(self, target: Any, draft: Any, ends: frozenset[int], end: int | None) -> None:
        self.encode, self.decode = _codec(draft)
        self.target_encode, self.target_decode = _codec(target)
        self.ends, self.end = ends, end
        theirs = ControlTokens(draft).ids
        self.controls = {token: theirs.get(text) for text, token in ControlTokens(target).ids.items()}
        first: list[int] = list(draft("", verbose=False)["input_ids"])[:1]
        self.begin = first if first and first[0] in (draft.bos_token_id, draft.cls_token_id) else []

    def open(self, token_ids: Sequence[int]) -> Transcript:
        """Return the script of a text that the target has as `token_ids`."""
        return Transcript(self, token_ids)


class Transcript:
    """One row's text in the draft's tokens."""

    own_tokens = True

    def __init__(self, translation: Translation, token_ids: Sequence[int]) -> None:
        self._both = translation
        self.tokens: list[int] = list(translation.begin)
        self._settled = len(self.tokens)  # tokens before the text that is encoded anew
        self._text = ""
        self._settle_at = LONG
        self._seen: list[int] = []  # of the target: some that were read, and those that are no whole character yet
        self._read = 0
        self._take(token_ids)
        self._encode()

    def extend(self, token_ids: Sequence[int]) -> int:
        """Take in what the target wrote; return how many of the first tokens are as they were."""
        before, settled = self.tokens, self._settled
        self._take(token_ids)
        self._encode()
        return _common(before, self.tokens, settled)

    def ends(self, token: int) -> bool:
        """Return whether nothing follows `token` of the draft."""
        return token in self._both.ends

    def guesses(self, drafted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the target's tokens for `drafted`, and on how many of these each of them rests."""
        both = self._both
        if self._read < len(self._seen):
            return [], []  # the target is amid a character
        count = next((i for i, token in enumerate(drafted) if token in both.ends), len(drafted))
        text, ends = _written(both.decode, self.tokens[-CONTEXT:], drafted[:count])
        ahead = self._text[-AHEAD:]
        ahead = ahead[max(0, ahead.find(" ")) :]
        own, whole = both.target_encode(ahead), both.target_encode(ahead + text)
        guesses = whole[len(own) :] if whole[: len(own)] == own else both.target_encode(text)
        _, target_ends = _written(both.target_decode, own[-CONTEXT:], guesses)
        rests = [_resting(end, ends) for end in target_ends]
        if count < len(drafted) and both.end is not None:
            guesses, rests = [*guesses, both.end], [*rests, count + 1]
        return guesses, rests

    def _take(self, token_ids: Sequence[int]) -> None:
        """Add the text of `token_ids`, and the control tokens that the draft has too."""
        run: list[int] = []
        for token in token_ids:
            if token not in self._both.controls:
                run.append(token)
                continue
            self._read_text(run)
            run = []
            self._encode()
            theirs = self._both.controls[token]
            if theirs is not None and [theirs] != self.tokens:
                self.tokens.append(theirs)
            self._settled, self._text, self._seen, self._read = len(self.tokens), "", [], 0
        self._read_text(run)

    def _read_text(self, token_ids: list[int]) -> None:
        if not token_ids:
            return
        decode, seen = self._both.target_decode, self._seen + token_ids
        waiting = 0  # tokens at the end that are no whole character yet
        while waiting < min(PARTS, len(seen) - self._read) and decode(seen[: len(seen) - waiting]).endswith(INCOMPLETE):
            waiting += 1
        if waiting == PARTS:
            waiting = 0  # it cannot be read, whatever follows
        end = len(seen) - waiting
        self._text += decode(seen[:end])[len(decode(seen[: self._read])) :]
        known = seen[self._read : end][-CONTEXT:] or seen[:end]
        self._seen, self._read = known + seen[end:], len(known)

    def _encode(self) -> None:
        """Encode the text that is not settled; settle what is far from its end."""
        text, encode = self._text, self._both.encode
        tokens = encode(text) if text else []
        self.tokens = self.tokens[: self._settled] + tokens
        if len(text) < self._settle_at:
            return
        for cut in _cuts(text):
            head = encode(text[:cut])
            if head + encode(text[cut:]) == tokens:
                self._settled += len(head)
                self._text, self._settle_at = text[cut:], LONG
                return
        self._settle_at = 2 * len(text)


def _codec(tokenizer: Any) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]:
    """Return what encodes and decodes plain text, with nothing added or taken away."""
    backend = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None
    if backend is not None:
        return (
            lambda text: list(backend.encode(text, add_special_tokens=False).ids),
            lambda ids: str(backend.decode(list(ids), skip_special_tokens=False)),
        )
    return (
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)),
    )


def _written(
    decode: Callable[[Sequence[int]], str], before: list[int], token_ids: Sequence[int]
) -> tuple[str, list[int]]:
    """Return the text of `token_ids` after `before`, up to its last whole character, and where each of them ends."""
    start = len(decode(before))
    ends = [len(decode([*before, *token_ids[: count + 1]])) - start for count in range(len(token_ids))]
    return decode([*before, *token_ids])[start:].rstrip(INCOMPLETE), ends


def _resting(end: int, ends: Sequence[int]) -> int:
    """Return how many tokens, ending at `ends`, are needed for the first `end` characters."""
    return next((count for count, each in enumerate(ends, 1) if each >= end), len(ends))


def _cuts(text: str) -> list[int]:
    """Return where to try to cut `text`: before and after its last spaces that are far from the end."""
    cuts: list[int] = []
    at = len(text) - SETTLED
    while len(cuts) < CUTS and (at := text.rfind(" ", 0, at)) > 0:
        cuts += [at, at + 1]
    return cuts


def _common(before: Sequence[int], after: Sequence[int], start: int) -> int:
    """Return how many leading tokens are the same; the first `start` are known to be."""
    count = start
    while count < min(len(before), len(after)) and before[count] == after[count]:
        count += 1
    return count
