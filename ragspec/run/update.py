"""What each row of an input asks now, found without loading any weights: the first half of `--update`.

    with Update(target, identity) as update:
        update.match(requests_of(session, source, update), whole=True, prune=False)

Prompts are built as the run builds them: after retrieval, in the config's order; but not of rows that this very config
has answered, unless a prompt depends on other records (`prompt.order: shared`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from ragspec.config.redaction import revealed
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import Source
from ragspec.inputs.feed import Feed
from ragspec.json_text import dumps
from ragspec.models.resolve import resolve, weights_state
from ragspec.outputs.answers import FailedRecord, RecordInFlight, record_fields
from ragspec.outputs.run_state import WEIGHTS
from ragspec.outputs.update import RowRequest, Update
from ragspec.retrieval.stage import Stage
from ragspec.run.answering import RecordTask, with_contexts
from ragspec.run.ordering import ordering_of
from ragspec.run.record_reader import RecordReader
from ragspec.run.request_builder import RequestBuilder
from ragspec.run.session import Session
from ragspec.speculation.methods import FAKE


def identity_of(session: Session) -> dict[str, object]:
    """Return what an output's state records of a run: what answers depend on, and what tells the model's weights."""
    config = session.config
    if config.model is None or config.runner == FAKE:
        return session.identity()
    weights = weights_state(resolve(config.model, revealed(config.runner_args.get("revision"))))
    return session.identity() | ({WEIGHTS: weights} if weights else {})


def requests_of(
    session: Session, source: Source, update: Update, limit: int | None = None, *, prune: bool = False
) -> list[RowRequest]:
    """Return what the first `limit` rows of a source ask, in their order.

    prune: raise ConfigError unless the rows tell which records left the input. Also raises it if no row is a record,
    but the output has answers.
    """
    shared = session.config.prompt.order == "shared"
    rows = _Rows(update, shared, session.config.output.include)
    reader = RecordReader(session.config, rows, source)
    builder = RequestBuilder(session)
    if shared:
        tasks = ordering_of(session, source, reader, limit).tasks()
    else:
        tasks = Feed(_tasks(reader, source, limit))
        if session.retriever is not None:
            tasks = Feed(Stage(session.retriever, lambda task: task.query, with_contexts).fill(tasks))
    try:
        for task in tasks:
            try:
                rows.add(task, builder.in_flight(task.index, task.record, task.key))
            except RecordError:
                rows.add(task, None)
    finally:
        tasks.close()
    if update.answers and not reader.records and rows.failed is not None:
        line, message = rows.failed
        where = f"{source.where(line)}: " if line is not None else ""
        raise ConfigError(
            f"--update: {where}{message}. No row of the input is a record any more, so every answer would be replaced "
            "by an error; repair the input, or give its columns with --columns"
        )
    if prune:
        _check_whole(session.config, source, reader)
    found = {index: row._replace(named=index not in reader.nameless) for index, row in rows.found.items()}
    return [found[index] for index in sorted(found)]


def _check_whole(config: RunConfig, source: Source, reader: RecordReader) -> None:
    """Raise ConfigError if answers might be removed because the input is damaged."""
    if not reader.records:
        raise ConfigError(
            f"--prune: {config.input} has no records, so all answers would be removed; repair the input, or run "
            "without --prune"
        )
    if numbers := sorted(reader.nameless.values()):
        others = f" and {len(numbers) - 1:,} more" if numbers[1:] else ""
        raise ConfigError(
            f"{source.where(numbers[0])}: this row{others} cannot be read, so --prune does not know which records left "
            "the input; repair the input, or run without --prune"
        )


def _tasks(reader: RecordReader, source: Source, limit: int | None) -> Iterator[RecordTask]:
    """Yield the tasks whose requests must be built."""
    for row in islice(source, limit):
        read = reader.read(row)
        if read is not None and read.wanted:
            yield read.task


class _Rows:
    """The rows found so far, by the index of their lines. Knows which are finished (record_reader.py)."""

    def __init__(self, update: Update, shared: bool, include: Sequence[str]) -> None:
        self.found: dict[int, RowRequest] = {}
        self.failed: tuple[int | None, str] | None = None  # of the first row that is no record: its number, and why
        self._update = update
        self._shared = shared
        self._include = include

    def add(self, task: RecordTask, flight: RecordInFlight | None) -> None:
        """Note a row that is a record. flight: what it asks, None if nothing can be asked."""
        row = RowRequest(task.key, task.record.id, "" if flight is None else flight.request)
        if flight is not None and not self._update.has_own(row):
            row = row._replace(shown=dumps(record_fields(flight, self._include)))
        self.found[task.index] = row

    def has(self, index: int, key: str) -> bool:
        stands = not self._shared and self._update.stands(key)
        if stands:
            self.found[index] = RowRequest(key)
        return stands

    def has_another(self, record_id: str) -> bool:
        return False

    def fail(self, index: int, failed: FailedRecord) -> None:
        self.failed = self.failed or (failed.line, failed.message)
        self.found[index] = RowRequest(failed.fingerprint, failed.name, "")
