"""Answer tasks: record task -> requests -> runner -> output line. This part of a run may happen on any machine.

Every stage is a generator that the runner pulls, so memory use does not grow with the input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from ragspec.errors import RecordError
from ragspec.host.collection import frozen_heap
from ragspec.inputs.feed import Feed, Spread
from ragspec.inputs.guessing import unread_passages
from ragspec.json_text import dumps
from ragspec.outputs.answers import (
    FailedRecord,
    LineFormat,
    PartialAnswer,
    RecordInFlight,
    answer_texts,
    distinct_answers,
    is_valid,
    partial_answer,
)
from ragspec.records import Copied, Failure, Generation, Passage, Record, Request
from ragspec.retrieval.search import Hit
from ragspec.retrieval.stage import Stage
from ragspec.run.request_builder import PendingRequests, RequestBuilder
from ragspec.run.session import Session
from ragspec.stats import Cost

HearAnswer = Callable[[PartialAnswer], None]
Hold = Callable[[Feed[list[Request]], Callable[[], int]], Feed[list[Request]]]


@dataclass(frozen=True, slots=True)
class RecordTask:
    """A record to answer.

    index: of its output line. number: of its input row. query: to search contexts with, None if it needs no search.
    """

    index: int
    key: str
    number: int
    record: Record
    query: str | None = None


@dataclass(frozen=True, slots=True)
class RecordResult:
    """The output line of a record, without its line end, and what it took.

    costs: one for each answer in the line. passages: of a question, how many its prompt kept and dropped; None for
    other records. unread: the name of a metadata field that looks like passages. id: the record's.
    """

    index: int
    line: bytes
    prompt_tokens: int
    costs: list[Cost]
    passages: tuple[int, int] | None = None
    unread: str = ""
    id: str = ""


class ResultSink(Protocol):
    """Receives the outcome of each record: its output line, or its failure."""

    def put(self, result: RecordResult) -> None: ...

    def fail(self, index: int, failed: FailedRecord) -> None: ...


class Answering:
    """One pass of a session's runner over the tasks of an input.

    Args:
        session: The runner, prompts and retriever to use.
        shape: The format of the output lines.
        sink: Receives the results and failures.
        details: Also write what an audit and a report need.
        hear: Called with each answer as it grows, if the runner can tell.
        hold: Holds records back: given the requests of each and how many have an outcome, returns those to answer.
    """

    def __init__(
        self,
        session: Session,
        shape: LineFormat,
        sink: ResultSink,
        *,
        details: bool = False,
        hear: HearAnswer | None = None,
        hold: Hold | None = None,
    ) -> None:
        self._runner = session.runner
        self._shape = shape
        self._sink = sink
        self._details = details
        self._hear = hear
        self._stage = Stage(session.retriever, lambda task: task.query, with_contexts) if session.retriever else None
        self._builder = RequestBuilder(session)
        self._pending = PendingRequests()
        self._hold = hold
        self._finished = 0  # records with an outcome

    def requests(self, tasks: Feed[RecordTask]) -> Feed[Request]:
        """Return the tasks as requests. Close the feed after use; that stops the search-ahead thread."""
        if self._stage is not None:
            tasks = Feed(self._stage.fill(tasks))
        records = Feed(Spread(tasks, self._build_requests))
        held = records if self._hold is None else self._hold(records, lambda: self._finished)
        return Feed(Spread(held, iter))

    def outcomes(self, requests: Feed[Request]) -> Iterator[None]:
        """Run the requests; yield after each outcome."""
        with frozen_heap():
            for outcome in self._runner.generate(requests):
                self._finish(outcome)
                yield

    def retrieval(self) -> dict[str, Any] | None:
        """Return the statistics of the searches, None if there is no retriever."""
        return self._stage.to_json() if self._stage is not None else None

    def notes(self) -> list[str]:
        """Return notes for the user about the records that were read."""
        return self._builder.notes()

    def _build_requests(self, task: RecordTask) -> list[list[Request]]:
        """Return the requests of one record, or of none if it has failed."""
        try:
            flight = self._builder.in_flight(task.index, task.record, task.key)
            requests = self._pending.requests(flight)
            if self._hear is not None:
                requests[0] = replace(requests[0], hear=partial(self._heard, flight))
            return [requests]
        except RecordError as error:
            self._sink.fail(task.index, FailedRecord(task.record.id, task.key, "RecordError", str(error), task.number))
            return []

    def _heard(self, flight: RecordInFlight, token_ids: Sequence[int], copied: Sequence[Copied]) -> None:
        assert self._hear is not None
        self._hear(partial_answer(flight, token_ids, copied, self._runner.tokenizer))

    def _finish(self, outcome: Generation | Failure) -> None:
        finished = self._pending.take(outcome)
        if finished is None:
            return
        self._finished += 1
        flight, answers = finished
        if isinstance(answers, Failure):
            self._fail(flight, answers.kind, answers.message)
            return
        line = self._shape.answer(flight, answers, self._runner, details=self._details)
        try:
            encoded = dumps(line)
        except TypeError as error:  # metadata that can be read but not written back
            self._fail(flight, "RecordError", f"its metadata cannot be written ({error})")
            return
        costs = self._costs(flight, answers)
        passages, unread = _passages(flight)
        found = RecordResult(flight.index, encoded, flight.prompt_tokens, costs, passages, unread, flight.record.id)
        self._sink.put(found)

    def _costs(self, flight: RecordInFlight, answers: Sequence[Generation]) -> list[Cost]:
        """Return what each distinct answer took."""
        copies, firsts = Counter(map(id, answers)), set(map(id, answers[:: flight.n]))
        return [
            self._cost(flight, each, copies[id(each)], first=id(each) in firsts) for each in distinct_answers(answers)
        ]

    def _cost(self, flight: RecordInFlight, answer: Generation, copies: int, *, first: bool) -> Cost:
        """Return what an answer took. copies: how often the line has it. first: it is the first to its prompt."""
        valid = None
        if flight.form is not None:
            text = answer_texts(flight, [answer], self._runner.tokenizer)[0].text
            valid = is_valid(flight, flight.form, answer, text)
        return Cost(
            len(answer.token_ids),
            answer.cached_prompt_tokens if first else 0,
            answer.spec,
            answer.latency_s,
            answer.time_to_first_token_s,
            answer.undrafted,
            valid,
            answer.finish_reason != "length",
            copies,
        )

    def _fail(self, flight: RecordInFlight, kind: str, message: str) -> None:
        failed = FailedRecord(flight.record.id, flight.fingerprint, kind, message, request=flight.request)
        self._sink.fail(flight.index, failed)


def _passages(flight: RecordInFlight) -> tuple[tuple[int, int] | None, str]:
    """Return the (kept, dropped) passage counts of a question's prompt, and a field that looks like unread passages."""
    record = flight.record
    kept, dropped = len(flight.prompt.kept), len(flight.prompt.dropped)
    if kept or dropped:
        return (kept, dropped), ""
    if record.contexts:  # the template does not use them
        return None, ""
    if record.query is None:  # beside messages or a prompt, lists under other names are most often something else
        return None, unread_passages(record.metadata, usual_name=True)
    return (0, 0), unread_passages(record.metadata)


def with_contexts(task: RecordTask, hits: list[Hit]) -> RecordTask:
    """Return the task with the retrieved passages as its record's contexts."""
    passages = (hit.passage for hit in hits)
    found = tuple(Passage(each.id, each.text, each.title or None, each.score) for each in passages)
    return replace(task, record=replace(task.record, contexts=found))
