"""The required form of an answer, as a grammar in llguidance's Lark, which both engines compile alike.

    >>> Form("choice", ["yes", "no"]).grammar()
    'start: "yes" | "no"'

JSON is spaced as by `json.dumps`, with ", " and ": " and no other white space: with free white space a model can write
blanks until its tokens run out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragspec.errors import RecordError
from ragspec.records import Passage, Thinking
from ragspec.structured.quotes import quoting
from ragspec.structured.schema import check_schemas_in, completed, inline, quotes, unwrapped

LARGEST = 1 << 20  # characters of a grammar
BLANKS = r"/[ \n\r\t]{0,4}/"  # between reasoning and answer


@dataclass(frozen=True, slots=True)
class Form:
    """One form of answers. spec: a schema, a regular expression, a list of texts, or a grammar (Lark or GBNF)."""

    kind: str
    spec: Any

    @property
    def is_json(self) -> bool:
        """Return whether answers are JSON."""
        return self.kind == "json_schema"

    def grammar(self, passages: Sequence[Passage] = ()) -> str:
        """Return the grammar of an answer about `passages`. Raises RecordError if there is none."""
        written = _WRITERS[self.kind](self.spec, passages)
        if len(written) > LARGEST:
            raise RecordError(f"structured.{self.kind}: has {len(written):,} characters, {LARGEST:,} at most")
        return written


def after_thinking(grammar: str, thinking: Thinking) -> str:
    """Return the grammar of an answer after optional reasoning, which may contain anything but its closing marker."""
    closing = json.dumps(thinking.closing)
    rules = [f"thought_text[suffix={closing}]: /(?s:.*)/"]
    thought, opening = "thought_text", json.dumps(thinking.opening)
    if thinking.closing_ids:  # a control token does not match its letters
        marker = " ".join(f"<[{token}]>" for token in (*thinking.ends[:1], *thinking.closing_ids))
        rules.append(f"thought_tokens: /(?s:.*)/ {marker}")
        thought = f"({thought} | thought_tokens)"
        opening = f"({opening} | {' '.join(f'<[{token}]>' for token in thinking.opening_ids)})"
    begin = thought if thinking.inside else f"({opening} {thought} BLANKS)?"
    blanks = " BLANKS" if thinking.inside else ""
    return "\n".join(
        [f"start: {begin}{blanks} answer", *rules, f"BLANKS: {BLANKS}", f"answer: %lark {{\n{grammar}\n}}"]
    )


def _json(schema: Any, passages: Sequence[Passage]) -> str:
    schema = completed(unwrapped(schema), passages)
    return quoting(schema, passages) if quotes(schema) else f"start: {inline(schema)}"


def _regex(pattern: str, passages: Sequence[Passage]) -> str:
    from llguidance import regex_to_lark

    return f"start: /{regex_to_lark(pattern, use_ascii='')}/"


def _choice(texts: Sequence[str], passages: Sequence[Passage]) -> str:
    return "start: " + " | ".join(json.dumps(text) for text in texts)


def _grammar(text: str, passages: Sequence[Passage]) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    check_schemas_in(text)
    try:
        return str(any_to_lark(text))
    except Exception as error:  # any_to_lark raises plain Exception
        raise RecordError(f"structured.grammar: is neither Lark nor GBNF ({error})") from None


_WRITERS = {"json_schema": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}
