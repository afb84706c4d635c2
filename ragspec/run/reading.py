"""Rows -> records -> what the runner is asked: prompts, sampling, how many answers. What cannot be is a RecordError."""

from __future__ import annotations

from dataclasses import replace

from pydantic import ValidationError

from ragspec.config.run import to_sampling
from ragspec.config.sections import SamplingConfig
from ragspec.errors import RecordError
from ragspec.inputs.base import Row
from ragspec.inputs.keyset import KeySet
from ragspec.inputs.record import parse_record
from ragspec.outputs.answers import Flight
from ragspec.records import Record, Sampling
from ragspec.run.session import Session

MODELS_NAMED = 5  # in a note


class Reader:
    """Reads the rows of one pass, in order."""

    def __init__(self, session: Session) -> None:
        config = session.config
        self._config = config
        self._prompts = session.prompts
        self._locate = session.runner.cites
        self._default = to_sampling(config.sampling)
        self._seen = KeySet()
        self._names = {str(config.model), str(config.model).rstrip("/").rpartition("/")[2], config.output.model}
        self._other_models: set[str] = set()  # that records ask for

    def record(self, row: Row) -> Record:
        """Return the record that a row is. Raises RecordError; so for an id that an earlier row had."""
        if isinstance(row.value, RecordError):
            raise row.value
        record = parse_record(row.value, row.number, self._config.prompt.source)
        if not self._seen.add(record.id):
            own = isinstance(row.value, dict) and ("id" in row.value or "custom_id" in row.value)
            clash = "appears twice" if own else "(its line number, as it has no id) is another record's id too"
            raise RecordError(f'id "{record.id}" {clash}; only the first record with that id is answered')
        return record

    def flight(self, index: int, record: Record, fingerprint: str) -> Flight:
        """Return what is asked for line number `index`. Raises RecordError."""
        sampling, n = self._sampling(record)
        parts = [replace(record, prompt=each) for each in record.prompts] or [record]
        prompts = [self._prompts.build(part, sampling.max_new_tokens, locate=self._locate) for part in parts]
        if record.model is not None and record.model not in self._names and len(self._other_models) < MODELS_NAMED:
            self._other_models.add(record.model)
        return Flight(index, record, tuple(prompts), sampling, n, fingerprint)

    def notes(self) -> list[str]:
        """Return what the user should know about the records that were read."""
        if not self._other_models:
            return []
        others = ", ".join(sorted(self._other_models))
        return [f"records ask for {others}; {self._config.model} answers them"]

    def _sampling(self, record: Record) -> tuple[Sampling, int]:
        """Return how a record is sampled, and how many answers each prompt of it has."""
        if not record.sampling:
            return self._default, self._config.sampling.n
        try:
            merged = SamplingConfig.model_validate(self._config.sampling.model_dump() | record.sampling)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = "max_tokens" if first["loc"][0] == "max_new_tokens" else first["loc"][0]
            raise RecordError(f'"body.{name}": {first["input"]!r}: {first["msg"]}') from None
        return to_sampling(merged), merged.n
