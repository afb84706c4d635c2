"""The answers of a pass, read back for the audit and the report; and finished passes on disk, to resume a benchmark."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ragspec.benchmark.plan import Candidate
from ragspec.benchmark.process import Ready
from ragspec.benchmark.results import Details, Pass, Quote, parse
from ragspec.inputs.sources import digest
from ragspec.json_text import dumps, loads
from ragspec.outputs.folder import write_json
from ragspec.records import Sampling


@dataclass(frozen=True, slots=True)
class Answer:
    """One record's answer.

    guessed: a 1 per token that came from a draft, empty if unknown. copied_tokens: (start, end, passage id).
    token_logprobs: empty unless asked for. speculation: as in an output line. others: the record's further answers.
    """

    id: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    sampling: Sampling
    grammar: str = ""
    token_logprobs: list[float] = field(default_factory=list)
    guessed: list[int] = field(default_factory=list)
    copied_tokens: list[tuple[int, int, str]] = field(default_factory=list)
    question: str | None = None
    passages: list[Quote] = field(default_factory=list)
    speculation: dict[str, Any] = field(default_factory=dict)
    others: list[Answer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answers:
    """A pass's answers by record id, in output order, and the ids of its error lines."""

    answered: dict[str, Answer]
    failed: tuple[str, ...] = ()

    def each(self) -> Answers:
        """Return all answers by their own ids: a record may have several."""
        others = {other.id: other for answer in self.answered.values() for other in answer.others}
        return Answers(others | self.answered, self.failed)


def fingerprints(path: Path) -> dict[str, str]:
    """Return a hash of each record's tokens, of all its answers, by id, from an output written with details."""
    answers = read_answers(path).answered
    tokens = {name: [each.token_ids for each in (answer, *answer.others)] for name, answer in answers.items()}
    return {name: sha256(dumps(ids)).hexdigest()[:16] for name, ids in tokens.items()}


def read_answers(path: Path) -> Answers:
    """Return the answers of an output written with details."""
    lines = [loads(line) for line in path.read_bytes().splitlines()]
    answered = {line["id"]: parse(Answer, line) for line in lines if "error" not in line}
    return Answers(answered, tuple(line["id"] for line in lines if "error" in line))


# -- resume ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Entry:
    """A candidate's finished passes.

    identity: a hash of what they depend on. answers: per pass, a hash of each answer by record id. details: set once
    all passes are done.
    """

    identity: str
    ready: Ready | None = None
    passes: list[Pass] = field(default_factory=list)
    answers: list[dict[str, str]] = field(default_factory=list)
    details: Details | None = None


class Passes:
    """The entries of a benchmark, one file each: `folder`/passes/NAME.json."""

    def __init__(self, folder: Path, limit: int | None, resume: bool) -> None:
        self._folder = folder / "passes"
        self._limit = limit
        self._entries: dict[str, Entry] = {}
        self.kept = 0  # passes taken over from an earlier run
        if not resume:
            shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, candidate: Candidate) -> Entry:
        """Return the candidate's entry from an earlier run if config, input and limit are equal, else a new one."""
        identity = self._identity(candidate)
        entry = _read(self._path(candidate))
        if entry is None or entry.identity != identity or len(entry.answers) != len(entry.passes):
            entry = Entry(identity)
        self.kept += len(entry.passes)
        self._entries[candidate.name] = entry
        return entry

    def save(self, candidate: Candidate) -> None:
        """Write the candidate's entry."""
        write_json(self._path(candidate), self._entries[candidate.name])

    def _path(self, candidate: Candidate) -> Path:
        return self._folder / f"{candidate.name}.json"

    def _identity(self, candidate: Candidate) -> str:
        """Return a hash of what a pass depends on: config, limit and input bytes."""
        what = [digest(candidate.config.input), candidate.config.model_dump(mode="json"), self._limit]
        return hashlib.sha256(dumps(what)).hexdigest()


def _read(path: Path) -> Entry | None:
    """Return the entry in a file, None if there is none or another version wrote it."""
    if not path.is_file():
        return None
    try:
        return parse(Entry, loads(path.read_bytes()))
    except ValidationError:
        return None
