"""Turn records into requests, and collect the outcomes until a record has all of its own.

Mostly a record is one prompt and one answer; `n` asks for several answers per prompt, and a text completion may have
several prompts. A record that cannot become a request raises RecordError.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import NamedTuple

from pydantic import ValidationError

from ragspec.config.run import to_sampling
from ragspec.config.sections import SamplingConfig
from ragspec.config.structured import StructuredConfig, about_form
from ragspec.errors import RecordError
from ragspec.outputs.answers import RecordInFlight
from ragspec.records import Failure, Generation, Record, Request, Sampling
from ragspec.run.session import Session
from ragspec.structured.form import Form
from ragspec.structured.grammars import problem_of
from ragspec.structured.schema import SOME

MODELS_NAMED = 5  # models listed in a note
BODY_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}  # our key: OpenAI's key


class RequestBuilder:
    """Builds the prompts, sampling parameters and grammar of the records of one pass."""

    def __init__(self, session: Session) -> None:
        config = session.config
        self._config = config
        self._prompts = session.prompts
        self._locate = session.runner.cites
        self._default = to_sampling(config.sampling)
        self._default_form = config.structured.form if config.structured else None
        self._names = {str(config.model), str(config.model).rstrip("/").rpartition("/")[2], config.output.model}
        self._other_models: set[str] = set()  # models named by records, other than the config's

    def in_flight(self, index: int, record: Record, fingerprint: str) -> RecordInFlight:
        """Return what line `index` asks the runner for. Raises RecordError."""
        sampling, n, shrinks = self._sampling(record)
        parts = [replace(record, prompt=each) for each in record.prompts] or [record]
        longest = sampling.max_new_tokens
        prompts = [self._prompts.build(part, longest, locate=self._locate, shrinks=shrinks) for part in parts]
        if shrinks:
            room = self._prompts.room(max(len(prompt.token_ids) for prompt in prompts), longest)
            sampling = replace(sampling, max_new_tokens=room)
        if record.model is not None and record.model not in self._names and len(self._other_models) < MODELS_NAMED:
            self._other_models.add(record.model)
        form = self._form(record)
        grammar = form.grammar(prompts[0].kept) if form else ""
        if grammar and (sampling.ignore_eos or sampling.min_new_tokens):
            key = "ignore_eos" if sampling.ignore_eos else "min_new_tokens"
            raise RecordError(
                f"sampling.{key}: has no effect on a structured answer, which ends when its form is complete; remove it"
            )
        return RecordInFlight(index, record, tuple(prompts), sampling, n, fingerprint, form, grammar)

    def _form(self, record: Record) -> Form | None:
        """Return the form of a record's answer, None for free text."""
        if record.structured is None:
            return self._default_form
        if not record.structured:
            return None
        try:
            form = StructuredConfig.model_validate(record.structured).form
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            said = str(first["msg"]).removeprefix("Value error, ")
            raise RecordError(f"structured{''.join(f'.{part}' for part in first['loc'])}: {said}") from None
        if problem := problem_of(form.grammar(SOME)):
            raise RecordError(about_form(form, problem))
        return form

    def notes(self) -> list[str]:
        """Return notes for the user about the records that were read."""
        if not self._other_models:
            return []
        others = ", ".join(sorted(self._other_models))
        return [f"records ask for {others}; {self._config.model} answers them"]

    def _sampling(self, record: Record) -> tuple[Sampling, int, bool]:
        """Return a record's sampling, its answers per prompt, and whether max_new_tokens may shrink to fit."""
        if not record.sampling:
            return self._default, self._config.sampling.n, self._config.sampling.max_new_tokens is None
        try:
            merged = SamplingConfig.model_validate(self._config.sampling.model_dump() | record.sampling)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = BODY_NAMES.get(str(first["loc"][0]), first["loc"][0])
            raise RecordError(f'"body.{name}": {first["input"]!r}: {first["msg"]}') from None
        return to_sampling(merged), merged.n, merged.max_new_tokens is None


# -- pending requests ------------------------------------------------------------------------------


class FinishedRecord(NamedTuple):
    """A record with all its outcomes. answers: `n` for each prompt, in order; or the failure."""

    flight: RecordInFlight
    answers: list[Generation] | Failure


class _PendingRecord(NamedTuple):
    flight: RecordInFlight
    outcomes: list[Generation | Failure | None]


class PendingRequests:
    """Maps requests to records until all outcomes of a record are in."""

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: dict[int, tuple[int, _PendingRecord]] = {}

    def requests(self, flight: RecordInFlight) -> list[Request]:
        """Return the requests of a record. Greedy answers to a prompt are equal, so one request serves all `n`."""
        times = 1 if flight.sampling.temperature == 0 else flight.n
        waiting = _PendingRecord(flight, [None] * (times * len(flight.prompts)))
        requests = []
        for position in range(len(waiting.outcomes)):
            prompt = flight.prompts[position // times]
            # the first is sampled as a record's only answer would be
            name = flight.record.id if position == 0 else f"{flight.record.id}#{position}"
            index = next(self._numbers)
            self._waiting[index] = position, waiting
            request = Request(
                index,
                name,
                prompt.token_ids,
                flight.sampling,
                prompt.places,
                flight.whole_grammar(prompt),
                prompt.thinking,
            )
            requests.append(request)
        return requests

    def take(self, outcome: Generation | Failure) -> FinishedRecord | None:
        """Add an outcome; return the record if it was the last one missing."""
        position, waiting = self._waiting.pop(outcome.index)
        flight, outcomes = waiting
        outcomes[position] = outcome
        if any(each is None for each in outcomes):
            return None
        answers = [each for each in outcomes if isinstance(each, Generation)]
        failure = next((each for each in outcomes if isinstance(each, Failure)), None)
        if failure is not None:
            return FinishedRecord(flight, failure)
        if len(answers) < flight.n * len(flight.prompts):
            answers = [each for each in answers for _ in range(flight.n)]
        return FinishedRecord(flight, answers)
