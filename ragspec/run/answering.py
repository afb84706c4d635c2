"""What is asked -> requests -> a loaded runner -> output lines: the part of a run that may happen on any machine.

Everything is a generator, pulled by the runner, so memory does not grow with the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ragspec.errors import RecordError
from ragspec.inputs.columns import GUESSES
from ragspec.inputs.feed import Feed, Spread
from ragspec.json_text import dumps
from ragspec.outputs.answers import FailedRecord, LineFormat, RecordInFlight, answer_texts, distinct_answers, is_valid
from ragspec.records import Failure, Generation, Passage, Record, Request
from ragspec.retrieval.search import Hit
from ragspec.retrieval.stage import Stage
from ragspec.run.request_builder import PendingRequests, RequestBuilder
from ragspec.run.session import Session
from ragspec.stats import Cost


@dataclass(frozen=True, slots=True)
class RecordTask:
    """A record that wants an answer. index: of its output line. number: of its row. query: to find contexts by."""

    index: int
    key: str
    number: int
    record: Record
    query: str | None = None


@dataclass(frozen=True, slots=True)
class RecordResult:
    """A record's output line, without its end, and what it took. costs: of each answer that was written.

    passages: for a question, how many its prompt has, and how many were dropped; None for other records. unread: a
    field of it that looks like passages.
    """

    index: int
    line: bytes
    prompt_tokens: int
    costs: list[Cost]
    passages: tuple[int, int] | None = None
    unread: str = ""


class ResultSink(Protocol):
    """Takes what becomes of records."""

    def put(self, answered: RecordResult) -> None: ...

    def fail(self, index: int, failed: FailedRecord) -> None: ...


class Answering:
    """One pass of a session's runner over what is asked. details: also write what an audit and a report need."""

    def __init__(self, session: Session, shape: LineFormat, sink: ResultSink, *, details: bool = False) -> None:
        self._runner = session.runner
        self._shape = shape
        self._sink = sink
        self._details = details
        self._stage = Stage(session.retriever, lambda asked: asked.query, with_contexts) if session.retriever else None
        self._reader = RequestBuilder(session)
        self._gathering = PendingRequests()

    def requests(self, asked: Feed[RecordTask]) -> Feed[Request]:
        """Return what is asked as requests; close it after use, which ends what is searched ahead."""
        if self._stage is not None:
            asked = Feed(self._stage.fill(asked))
        return Feed(Spread(asked, self._requests_of))

    def outcomes(self, requests: Feed[Request]) -> Iterator[None]:
        """Answer the requests; yield after each answer."""
        for outcome in self._runner.generate(requests):
            self._finish(outcome)
            yield

    def retrieval(self) -> dict[str, Any] | None:
        """Return what the searches took, None where there were none."""
        return self._stage.to_json() if self._stage is not None else None

    def notes(self) -> list[str]:
        """Return what the user should know about the records that were read."""
        return self._reader.notes()

    def _requests_of(self, asked: RecordTask) -> list[Request]:
        try:
            return self._gathering.requests(self._reader.flight(asked.index, asked.record, asked.key))
        except RecordError as error:
            self._sink.fail(
                asked.index, FailedRecord(asked.record.id, asked.key, "RecordError", str(error), asked.number)
            )
            return []

    def _finish(self, outcome: Generation | Failure) -> None:
        landed = self._gathering.take(outcome)
        if landed is None:
            return
        flight, answers = landed
        if isinstance(answers, Failure):
            self._fail(flight, answers.kind, answers.message)
            return
        line = self._shape.answer(flight, answers, self._runner, details=self._details)
        try:
            encoded = dumps(line)
        except TypeError as error:  # metadata that can be read but not written back
            self._fail(flight, "RecordError", f"its metadata cannot be written ({error})")
            return
        costs = [self._cost(flight, answer) for answer in distinct_answers(answers)]
        self._sink.put(RecordResult(flight.index, encoded, flight.prompt_tokens, costs, *_passages(flight)))

    def _cost(self, flight: RecordInFlight, answer: Generation) -> Cost:
        valid = None
        if flight.form is not None:
            text = answer_texts(flight, [answer], self._runner.tokenizer)[0].text
            valid = is_valid(flight, flight.form, answer, text)
        return Cost(
            len(answer.token_ids),
            answer.cached_prompt_tokens,
            answer.spec,
            answer.latency_s,
            answer.time_to_first_token_s,
            answer.undrafted,
            valid,
            answer.finish_reason != "length",
        )

    def _fail(self, flight: RecordInFlight, kind: str, message: str) -> None:
        self._sink.fail(flight.index, FailedRecord(flight.record.id, flight.fingerprint, kind, message))


def _passages(flight: RecordInFlight) -> tuple[tuple[int, int] | None, str]:
    """Return how many passages a question is answered with and without, and which of its fields looks like some."""
    if flight.record.query is None:
        return None, ""
    kept, dropped = len(flight.prompt.kept), len(flight.prompt.dropped)
    metadata = flight.record.metadata
    unread = next((name for name in GUESSES["contexts"] if isinstance(metadata.get(name), list | dict)), "")
    return (kept, dropped), "" if kept or dropped else unread


def with_contexts(asked: RecordTask, hits: list[Hit]) -> RecordTask:
    """Return what is asked with the passages that were found for it."""
    passages = (hit.passage for hit in hits)
    found = tuple(Passage(each.id, each.text, each.title or None, each.score) for each in passages)
    return replace(asked, record=replace(asked.record, contexts=found))
