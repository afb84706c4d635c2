"""A tokenizer whose control tokens answer to other names, so that text with their old names is text like any other.

Everything else is as it was: normalisation, splitting, merges, spaces at the edges, what is put around a prompt. So
text is cut exactly as it would be if the control words in it were ordinary words.
Source: tokenizers 0.23, the tokenizer.json format. Its own `encode_special_tokens` splits special tokens wherever they
are, leaves other added ones whole, and a Unigram vocabulary still finds `</s>` as a piece.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from ragspec.records import Spans


class Renamed:
    """The renamed twin of a fast transformers tokenizer. controls: its control words and their ids."""

    def __init__(self, inner: Any, controls: Mapping[str, int]) -> None:
        from tokenizers import Tokenizer

        nonce = secrets.token_hex(8)  # nobody can guess these names; their edges matter to the text beside them
        self._names = {word: f"{word[0]}{nonce}{place:06x}{word[-1]}" for place, word in enumerate(controls)}
        described = orjson.loads(inner.backend_tokenizer.to_str())
        backend = Tokenizer.from_str(orjson.dumps(_renamed(described, self._names)).decode())
        self.inner = copy.copy(inner)
        self.inner._tokenizer = backend
        ids = {backend.token_to_id(name): controls[word] for word, name in self._names.items()}
        self._back = {new: old for new, old in ids.items() if new != old}

    def rename(self, text: str, own: Spans) -> str:
        """Return `text` with the control words at `own` under their new names."""
        parts, at = [], 0
        for start, end in own:
            parts += [text[at:start], self._names[text[start:end]]]
            at = end
        return "".join([*parts, text[at:]])

    def ids(self, token_ids: Sequence[int]) -> list[int]:
        """Return token ids of this tokenizer as the original's."""
        return [self._back.get(token, token) for token in token_ids] if self._back else list(token_ids)

    def places(self, offsets: Sequence[tuple[int, int]], text: str, own: Spans) -> list[tuple[int, int]]:
        """Return `offsets` into rename(text, own) as offsets into `text`."""
        place: list[int] = []  # of every character of the renamed text in `text`, and of what follows the last
        at = 0
        for start, end in own:
            place += [*range(at, start), *[start] * len(self._names[text[start:end]])]
            at = end
        place += range(at, len(text) + 1)
        return [(place[start], place[end]) for start, end in offsets]


def _renamed(described: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer.json with other names for some added tokens, in the list of them and in the vocabulary."""
    for token in described["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = described["model"]
    merges = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges") or ())
    merged = {one + two for one, two in merges}  # what a merge makes has to keep its name
    names = {word: name for word, name in names.items() if word not in merged}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(word, word): index for word, index in vocabulary.items()}
    else:  # Unigram: [piece, score], the place is the id
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return described
