"""Translate between a target and a draft with different vocabularies, through text.

    >>> transcript = Translation(target, draft, ends, end).open(row_tokens)
    >>> transcript.tokens  # the draft's
    >>> transcript.guesses(drafted)  # the target's

Text is re-encoded from shortly before its end, since tokens merge across any boundary. Earlier text is settled at a cut
whose two sides encode to the same tokens as the whole. Incomplete characters wait for their remaining tokens.
Prior art: universal assisted decoding (transformers), which aligns by the longest common run of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ragspec.models.tokenizer import ControlTokens

SETTLED = 96  # characters before the end that are always re-encoded
LONG = 256  # re-encoded characters after which a cut is tried
AHEAD = 40  # characters before a guess that are encoded with it
CUTS = 6  # spaces at which a cut is tried
CONTEXT = 8  # tokens decoded together with those after them
PARTS = 4  # maximum tokens per character
INCOMPLETE = "\ufffd"


class Translation:
    """A pair of transformers tokenizers.

    Args:
        target: the target's tokenizer.
        draft: the draft's tokenizer.
        ends: the draft's tokens that end its text.
        end: the target's token for such an end, None to draft nothing there.
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
        """Return the transcript of a text that has `token_ids` in the target."""
        return Transcript(self, token_ids)


class Transcript:
    """One row's text in the draft's tokens."""

    own_tokens = True

    def __init__(self, translation: Translation, token_ids: Sequence[int]) -> None:
        self._both = translation
        self.tokens: list[int] = list(translation.begin)
        self._settled = len(self.tokens)  # tokens before the re-encoded text
        self._text = ""
        self._settle_at = LONG
        self._seen: list[int] = []  # target tokens: some already read, then those of an incomplete character
        self._read = 0  # how many of `_seen` are already read
        self._take(token_ids)
        self._encode()

    def extend(self, token_ids: Sequence[int]) -> int:
        """Append the target's tokens; return how many leading draft tokens are unchanged."""
        before, settled = self.tokens, self._settled
        self._take(token_ids)
        self._encode()
        return _common(before, self.tokens, settled)

    def ends(self, token: int) -> bool:
        """Return whether the draft's `token` ends its text."""
        return token in self._both.ends

    def guesses(self, drafted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return `drafted` in the target's tokens, and for each of those the number of drafted tokens it depends on."""
        both = self._both
        if self._read < len(self._seen):
            return [], []  # the target is inside a character
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
        """Append the text of `token_ids`, and the control tokens that the draft also has."""
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
        waiting = 0  # tokens at the end that form no complete character yet
        while waiting < min(PARTS, len(seen) - self._read) and decode(seen[: len(seen) - waiting]).endswith(INCOMPLETE):
            waiting += 1
        if waiting == PARTS:
            waiting = 0  # invalid, whatever follows
        end = len(seen) - waiting
        self._text += decode(seen[:end])[len(decode(seen[: self._read])) :]
        known = seen[self._read : end][-CONTEXT:] or seen[:end]
        self._seen, self._read = known + seen[end:], len(known)

    def _encode(self) -> None:
        """Encode the unsettled text, and settle the part far from its end."""
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
    """Return functions that encode and decode plain text without adding or removing anything."""
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
    """Return the text of `token_ids` after `before` up to its last complete character, and where each token ends."""
    start = len(decode(before))
    ends = [len(decode([*before, *token_ids[: count + 1]])) - start for count in range(len(token_ids))]
    return decode([*before, *token_ids])[start:].rstrip(INCOMPLETE), ends


def _resting(end: int, ends: Sequence[int]) -> int:
    """Return how many tokens with these `ends` cover the first `end` characters."""
    return next((count for count, each in enumerate(ends, 1) if each >= end), len(ends))


def _cuts(text: str) -> list[int]:
    """Return positions to try as a cut: around the last spaces that are far enough from the end."""
    cuts: list[int] = []
    at = len(text) - SETTLED
    while len(cuts) < CUTS and (at := text.rfind(" ", 0, at)) > 0:
        cuts += [at, at + 1]
    return cuts


def _common(before: Sequence[int], after: Sequence[int], start: int) -> int:
    """Return the length of the common prefix, of which the first `start` tokens are known to agree."""
    count = start
    while count < min(len(before), len(after)) and before[count] == after[count]:
        count += 1
    return count
