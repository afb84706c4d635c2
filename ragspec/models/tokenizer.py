"""Tokenizers: control tokens, encoding with text from records kept apart from them, and loading.

    >>> controls = ControlTokens(tokenizer); controls.found("hi <|im_end|>")
    ['<|im_end|>']

Control tokens are the special tokens, and those other added tokens that the chat template writes (such as `<think>`) or
that look like `<|...|>`; tokens added for ordinary text (runs of spaces, HTML tags) are not. Limit: markers that are no
single token (Llama 2's `[INST]`) cannot be distinguished from text, not even by the model.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import groupby
from typing import Any

import orjson

from ragspec.errors import ConfigError, flat
from ragspec.models.resolve import TRUST_KEY, ModelSource, brings_code, needs_code
from ragspec.models.stopping import thinking_of
from ragspec.records import Spans

MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)  # DeepSeek uses the full-width bar
LEAST = 2  # characters; a space cannot be inserted into a single one
INCOMPLETE = "\ufffd"  # what part of a character is decoded to
LETTER = "<0x41>"  # A
SINGLE_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a token of a tokenizer that falls back to bytes


@cache
def _byte_level() -> dict[str, int]:
    """Return the bytes that the characters of byte-level vocabularies (GPT-2) stand for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {char: byte for byte, char in bytes_to_unicode().items()}


def bytes_of(token: str) -> bytes | None:
    """Return the bytes of a token as vocabularies write it, byte-level (GPT-2) or `<0xE2>`; None if it is neither."""
    if single := SINGLE_BYTE.fullmatch(token):
        return bytes([int(single[1], 16)])
    known = _byte_level()
    return bytes(known[char] for char in token) if all(char in known for char in token) else None


class ControlTokens:
    """The control words of a transformers tokenizer, and their places in texts."""

    def __init__(self, inner: Any) -> None:
        self.ids = control_ids(inner)
        # the unknown token may result from any character
        self._numbers = frozenset(self.ids.values()) - {getattr(inner, "unk_token_id", None)}
        self._normalizer = inner.backend_tokenizer.normalizer if self.ids and inner.is_fast else None
        self._word = re.compile(pattern(self.ids)) if self.ids else None
        self._normal_word = None
        self.words = frozenset(self.ids)
        if self._normalizer is not None:
            self.words |= {normal for word in self.ids if (normal := self.normal(word).strip("▁ "))}
            self._normal_word = re.compile(pattern(self.words))

    def among(self, token_ids: Iterable[int]) -> list[int]:
        """Return the control tokens in `token_ids`, except the unknown token."""
        return [token for token in token_ids if token in self._numbers]

    def normal(self, text: str) -> str:
        """Return `text` as the tokenizer normalises it before it looks for tokens."""
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))

    def found(self, text: str) -> list[str]:
        """Return the control words in `text` in order, then those in its normal form, if the tokenizer normalises."""
        if self._word is None:
            return []
        words = self._word.findall(text)
        return words if self._normal_word is None else [*words, *self._normal_word.findall(self.normal(text))]

    def span(self, text: str, start: int, end: int) -> tuple[int, int] | None:
        """Return the span of the first control word in text[start:end], None without one."""
        found = self._word.search(text, start, end) if self._word else None
        return found.span() if found else None

    def apart(self, text: str) -> str:
        """Return `text` with a space inside each control word, which makes it text."""
        return text if self._word is None else self._word.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)


def control_ids(inner: Any) -> dict[str, int]:
    """Return the control words that a transformers tokenizer recognises in texts, with their ids."""
    template = inner.chat_template or ""
    written = "".join(template.values()) if isinstance(template, dict) else str(template)
    added = getattr(inner, "added_tokens_decoder", None)
    if not isinstance(added, dict):
        return {}  # mistral-common, which recognises no control tokens in texts
    found = {word: inner.convert_tokens_to_ids(word) for word in inner.all_special_tokens}
    for index, token in added.items():
        word = str(token)
        # a template's source also has newlines and Jinja keywords, so only tags count
        tag = any(map(str.isalnum, word)) and not (word[0].isalnum() or word[-1].isalnum())
        if token.special or MARKER.fullmatch(word) or (tag and word in written):
            found[word] = index
    return {word: index for word, index in found.items() if len(word) >= LEAST and isinstance(index, int)}


def pattern(words: Iterable[str]) -> str:
    """Return a regular expression (a trie) for the longest of `words`, in time independent of their number."""
    tails: dict[str, list[str]] = {}
    ends = False
    for word in words:
        if word:
            tails.setdefault(word[0], []).append(word[1:])
        ends = ends or not word
    branches = [re.escape(head) + pattern(rest) for head, rest in tails.items()]
    if not branches:
        return ""
    joined = f"(?:{'|'.join(branches)})"
    return f"{joined}?" if ends else joined


# -- encoding --------------------------------------------------------------------------------------


class HFTokenizer:
    """Encodes prompts and decodes answers.

    Args:
        inner: a transformers tokenizer.
        encode_args: arguments of every tokenizer call; they override ragspec's.
        width: tokens that the model embeds; by default as many as the tokenizer has.

    Attributes:
        ends: the model's end tokens, once it is loaded; they need not be special tokens of the tokenizer.
    """

    def __init__(self, inner: Any, encode_args: dict[str, Any] | None = None, width: int | None = None) -> None:
        self.inner = inner
        self._width = width
        self.ends: frozenset[int] = frozenset()
        self.has_chat_template = bool(inner.chat_template)
        self.controls = ControlTokens(inner)
        self.thinking = thinking_of(inner)
        self._encode_args = {"verbose": False, **(encode_args or {})}
        self._latest: tuple[Any, Any] = (None, None)  # what encode() was given last, and what came of it

    def encode(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[int]:
        """Return the token ids of `text`.

        Args:
            text: the text.
            special_tokens: add the tokenizer's special tokens, except an end-of-sequence token: `text` is continued.
            own: spans of control words that become control tokens, the rest being text; None: all control words do.
        """
        ids = list(self._encoded(text, own, special_tokens)["input_ids"])
        ids = ids if own is None else self._masked.ids(ids)
        return ids[self._wanted(ids, special_tokens)]

    def _wanted(self, ids: list[int], special_tokens: bool) -> slice:
        """Return the tokens of a prompt among those that the tokenizer made of it."""
        end = len(ids) - (special_tokens and self._adds_end and ids[-1:] == [self.inner.eos_token_id])
        return slice(self._redundant_bos(ids, special_tokens), end)

    def _redundant_bos(self, ids: list[int], special_tokens: bool) -> int:
        """Return how many leading begin-of-sequence tokens are redundant.

        The tokenizer adds one to a text that may already begin with one, written by a template or a user.
        """
        if not special_tokens or self.bos is None or ids[:2] != [self.bos, self.bos]:
            return 0
        return next((at for at, token in enumerate(ids) if token != self.bos), len(ids)) - 1

    @cached_property
    def bos(self) -> int | None:
        """Return the begin-of-sequence token if the tokenizer adds it to texts, else None."""
        token = self.inner.bos_token_id
        ids = self.inner("a", verbose=False)["input_ids"]
        return token if token is not None and ids[:1] == [token] else None

    @cached_property
    def _adds_end(self) -> bool:
        """Whether the tokenizer puts the end-of-sequence token behind texts (`add_eos_token`)."""
        end = self.inner.eos_token_id
        with_end, without = (self._call("a", None, added)["input_ids"][-1:] for added in (True, False))
        return end is not None and with_end == [end] and without != [end]

    def control_ids(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[int]:
        """Return the control tokens in encode()'s result for the untruncated `text`, in order."""
        ids = self._call(text, own, special_tokens, truncation=False)["input_ids"]
        return self.controls.among(ids if own is None else self._masked.ids(ids))

    def control_spans(self, text: str, *, special_tokens: bool) -> Spans | None:
        """Return the spans in `text` of encode()'s control tokens, None if they cannot be located."""
        if not self.inner.is_fast:
            return None
        read = self._call(text, None, special_tokens, truncation=False, return_offsets_mapping=True)
        spans = []
        for token, (start, end) in zip(read["input_ids"], read["offset_mapping"], strict=True):
            span = self.controls.span(text, start, end)  # a token may include spaces around its word
            if span is not None and self.controls.ids[text[slice(*span)]] == token:
                spans.append(span)
            elif start < end and self.controls.among([token]):
                return None  # another word normalises to this control token
        return spans

    def offsets(self, text: str, *, special_tokens: bool, own: Spans | None = None) -> list[tuple[int, int]] | None:
        """Return the span in `text` of each token of encode(), None if the tokenizer has no offsets.

        Takes little time after encode() with the same arguments.
        """
        if not self.inner.is_fast:
            return None
        found = self._encoded(text, own, special_tokens)
        offsets = found.encodings[0].offsets
        offsets = offsets if own is None else self._masked.places(offsets, text, own)
        ids = list(found["input_ids"])
        return offsets[self._wanted(ids if own is None else self._masked.ids(ids), special_tokens)]

    @cached_property
    def _masked(self) -> MaskedTokenizer:
        return MaskedTokenizer(self.inner, self.controls.ids)

    def _encoded(self, text: str, own: Spans | None, special_tokens: bool) -> Any:
        """Return the tokenizer's encoding of a text; the latest is kept."""
        given = text, own, special_tokens
        known, found = self._latest
        if known != given:
            found = self._call(text, own, special_tokens)
            self._latest = given, found
        return found

    def _call(self, text: str, own: Spans | None, special_tokens: bool, **more: Any) -> Any:
        args = {"add_special_tokens": special_tokens, **self._encode_args, **more}
        if own is None:
            return self.inner(text, **args)
        return self._masked.inner(self._masked.rename(text, own), **args)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids` without special tokens."""
        text: str = self.inner.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self._valid_bytes.decode(token_ids) if INCOMPLETE in text and self._valid_bytes else text

    @cached_property
    def _valid_bytes(self) -> ValidBytes | None:
        backend = self.inner.backend_tokenizer if self.inner.is_fast else None
        if backend is None or backend.decoder is None or backend.token_to_id(LETTER) is None:
            return None
        return ValidBytes(backend) if backend.decoder.decode([LETTER]) == "A" else None

    @property
    def width(self) -> int:
        """Return how many tokens the model embeds."""
        return self.size if self._width is None else self._width

    @property
    def size(self) -> int:
        """Return how many tokens the vocabulary has."""
        return len(self.inner)

    def piece(self, token_id: int) -> str:
        """Return the text of one token, including a control token's name."""
        text: str = self.inner.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def piece_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be part of a character."""
        piece = self.piece(token_id)
        if INCOMPLETE in piece:
            found = bytes_of(str(self.inner.convert_ids_to_tokens(token_id)))
            if found is not None and found.decode(errors="replace") == piece:
                return found
        return piece.encode(errors="replace")

    def render_chat(self, messages: list[dict[str, Any]], **args: Any) -> str:
        """Return the chat in the model's template, up to where the answer begins.

        args: of apply_chat_template, and variables of the template.
        """
        if not args.get("continue_final_message"):
            args.setdefault("add_generation_prompt", True)
        text: str = self.inner.apply_chat_template(messages, tokenize=False, **args)
        return text


def load_tokenizer(
    source: ModelSource,
    *,
    key: str = "model",
    trust_remote_code: bool = False,
    trust_key: str = TRUST_KEY,
    extra: dict[str, Any] | None = None,
) -> Any:
    """Return the transformers tokenizer of a model. Raises ConfigError beginning with `key`.

    trust_key: the config key that allows the tokenizer's own code, for messages. extra: from_pretrained arguments.
    """
    from transformers import AutoTokenizer

    args = {"revision": source.revision or "main", "trust_remote_code": trust_remote_code, **(extra or {})}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, **args)
    except Exception as error:  # tokenizers raises Exception itself, a tokenizer's own code anything
        if not args["trust_remote_code"] and brings_code(source):
            raise ConfigError(f'{key}: "{source.name}": its tokenizer {needs_code(trust_key)}') from error
        text = flat(error, 200)
        raise ConfigError(f'{key}: "{source.name}": its tokenizer cannot be loaded ({text})') from error
    if isinstance(most := tokenizer.model_max_length, str):
        raise ConfigError(f'{key}: "{source.name}": its tokenizer\'s model_max_length must be a number, not "{most}"')
    return tokenizer


# -- single bytes ----------------------------------------------------------------------------------


class ValidBytes:
    """Decodes with a fast tokenizer that falls back to bytes (Llama 2, Mistral), keeping what is valid.

    tokenizers 0.23 makes every byte of a run a replacement character if the run ends within a character: a line end
    would disappear with the first byte of an emoji, and return with its last.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of `token_ids` without special tokens, and one replacement character per invalid part."""
        known = (self._backend.id_to_token(token) for token in token_ids if token not in self._special)
        words = (word for word in known if word is not None)
        pieces: list[str] = []
        for single, run in groupby(words, lambda word: SINGLE_BYTE.fullmatch(word) is not None):
            found = list(run)
            pieces += self._valid(found) if single else found
        text: str = self._backend.decoder.decode(pieces)
        return text

    @staticmethod
    def _valid(run: list[str]) -> list[str]:
        """Return a run of single bytes with its invalid parts replaced."""
        values, pieces, at = bytes(int(word[3:5], 16) for word in run), list[str](), 0
        while at < len(values):
            try:
                values[at:].decode()
            except UnicodeDecodeError as error:
                pieces += [*run[at : at + error.start], INCOMPLETE]
                at += error.end
            else:
                return pieces + run[at:]
        return pieces


# -- masked control tokens -------------------------------------------------------------------------


class MaskedTokenizer:
    """A copy of a fast transformers tokenizer whose control tokens have other names.

    Control words in a text then encode exactly as ordinary words would; normalisation, splitting, merges, spaces at the
    edges and added tokens are unchanged. tokenizers' own `encode_special_tokens` does not do this: it splits special
    tokens everywhere, keeps other added tokens whole, and a Unigram vocabulary still finds `</s>` as a piece.
    Source: tokenizers 0.23, the tokenizer.json format. controls: the control words and their ids.
    """

    def __init__(self, inner: Any, controls: Mapping[str, int]) -> None:
        from tokenizers import Tokenizer

        # makes names unguessable; first and last characters stay, as they affect neighbours
        nonce = secrets.token_hex(8)
        self._names = {word: f"{word[0]}{nonce}{place:06x}{word[-1]}" for place, word in enumerate(controls)}
        described = orjson.loads(inner.backend_tokenizer.to_str())
        backend = Tokenizer.from_str(orjson.dumps(_renamed(described, self._names)).decode())
        self.inner = copy.copy(inner)
        self.inner._tokenizer = backend
        ids = {backend.token_to_id(name): controls[word] for word, name in self._names.items()}
        self._back = {new: old for new, old in ids.items() if new != old}

    def rename(self, text: str, own: Spans) -> str:
        """Return `text` with the control words at `own` replaced by their new names."""
        parts, at = [], 0
        for start, end in own:
            parts += [text[at:start], self._names[text[start:end]]]
            at = end
        return "".join([*parts, text[at:]])

    def ids(self, token_ids: Sequence[int]) -> list[int]:
        """Return this tokenizer's token ids as the original's."""
        return [self._back.get(token, token) for token in token_ids] if self._back else list(token_ids)

    def places(self, offsets: Sequence[tuple[int, int]], text: str, own: Spans) -> list[tuple[int, int]]:
        """Return `offsets` into rename(text, own) as offsets into `text`."""
        place: list[int] = []  # per character of the renamed text, and for its end: the position in `text`
        at = 0
        for start, end in own:
            place += [*range(at, start), *[start] * len(self._names[text[start:end]])]
            at = end
        place += range(at, len(text) + 1)
        return [(place[start], place[end]) for start, end in offsets]


def _renamed(described: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer.json with added tokens renamed, in their list and in the vocabulary."""
    for token in described["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = described["model"]
    merges = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges") or ())
    merged = {one + two for one, two in merges}  # results of merges keep their names
    names = {word: name for word, name in names.items() if word not in merged}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(word, word): index for word, index in vocabulary.items()}
    else:  # Unigram: [piece, score], where the index is the id
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return described
