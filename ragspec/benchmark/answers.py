"""The answers of a pass, read back from its output: what an audit and a report look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from ragspec.benchmark.results import Quote, parse
from ragspec.json_text import dumps, loads
from ragspec.records import Sampling


@dataclass(frozen=True, slots=True)
class Answer:
    """One record's answer.

    guessed: a 1 per token that a draft had guessed; empty where that is not known. copied_tokens: (start, end, id of
    the passage). speculation: as in an output line.
    """

    id: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    sampling: Sampling
    grammar: str = ""
    guessed: list[int] = field(default_factory=list)
    copied_tokens: list[tuple[int, int, str]] = field(default_factory=list)
    question: str | None = None
    passages: list[Quote] = field(default_factory=list)
    speculation: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answers:
    """A pass's answers by record, in the order of its output, and the ids of its error lines."""

    answered: dict[str, Answer]
    failed: tuple[str, ...] = ()


def fingerprints(path: Path) -> dict[str, str]:
    """Return a hash of each answer's tokens, by record, of an output that was written with details."""
    answers = read_answers(path).answered
    return {name: sha256(dumps(answer.token_ids)).hexdigest()[:16] for name, answer in answers.items()}


def read_answers(path: Path) -> Answers:
    """Return the answers of an output that was written with details."""
    lines = [loads(line) for line in path.read_bytes().splitlines()]
    answered = {line["id"]: parse(Answer, line) for line in lines if "error" not in line}
    return Answers(answered, tuple(line["id"] for line in lines if "error" in line))
