"""What an answer is to look like, as a grammar in llguidance's Lark: one text that both engines compile alike.

    >>> Form("choice", ["yes", "no"]).grammar()
    'start: "yes" | "no"'

JSON is written as `json.dumps` writes it, with ", " and ": " and no other white space: with free white space a model
can go on writing blanks until its tokens are used up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragspec.errors import RecordError
from ragspec.records import Passage
from ragspec.structured.quotes import quoting
from ragspec.structured.schema import completed, inline, quotes

LARGEST = 1 << 20  # characters of a grammar


@dataclass(frozen=True, slots=True)
class Form:
    """One form of answers. spec: a schema, a regular expression, a list of texts, or a grammar (Lark or GBNF)."""

    kind: str
    spec: Any

    @property
    def is_json(self) -> bool:
        """Whether answers are JSON."""
        return self.kind == "json_schema"

    def grammar(self, passages: Sequence[Passage] = ()) -> str:
        """Return the grammar of an answer that rests on `passages`. Raises RecordError where there can be none."""
        written = _WRITTEN[self.kind](self.spec, passages)
        if len(written) > LARGEST:
            raise RecordError(f"structured.{self.kind}: has {len(written):,} characters, {LARGEST:,} at most")
        return written


def _json(schema: Any, passages: Sequence[Passage]) -> str:
    schema = completed(schema, passages)
    return quoting(schema, passages) if quotes(schema) else f"start: {inline(schema)}"


def _regex(pattern: str, passages: Sequence[Passage]) -> str:
    from llguidance import regex_to_lark

    return f"start: /{regex_to_lark(pattern, use_ascii='')}/"


def _choice(texts: Sequence[str], passages: Sequence[Passage]) -> str:
    return "start: " + " | ".join(json.dumps(text) for text in texts)


def _grammar(text: str, passages: Sequence[Passage]) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # its own parser raises Exception itself
        raise RecordError(f"structured.grammar: is neither Lark nor GBNF ({error})") from None


_WRITTEN = {"json_schema": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}
