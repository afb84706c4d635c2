"""The driver of a run on many workers: it reads rows, leases records to workers, and writes the lines they return.

>>> group_of(Record("q1", query="Who wrote it?", contexts=(Passage("1", "Ann wrote it."),)))
b'...'

Records that start alike form a group and go to one worker, which has their prefix cached and drafts from their text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from ragspec.inputs.base import Source
from ragspec.outputs.answers import FailedRecord, NativeFormat
from ragspec.outputs.journal import Journal
from ragspec.outputs.openai_batch import line_format_of
from ragspec.records import Record
from ragspec.retrieval.stage import retrieval_statistics
from ragspec.run.answering import RecordTask
from ragspec.run.energy import RunEnergy
from ragspec.run.ordering import Say, ignore_note, ordering_of
from ragspec.run.ray.leases import Leases
from ragspec.run.ray.messages import WorkerMessage
from ragspec.run.ray.worker_handle import WorkerHandle
from ragspec.run.ray.worker_pool import LostWorker, WorkerPool
from ragspec.run.record_reader import RecordReader
from ragspec.run.result_writer import Observer, Report, ResultWriter
from ragspec.run.session import Session

HEAD = 1024  # leading characters that name the group of a prompt without passages; shorter prompts have none
HEAD_TOKENS = 256


def group_of(record: Record) -> bytes | None:
    """Return the key of the group of records that start alike; None for a record with little to share."""
    head = _head(record)
    return blake2b(head.encode(), digest_size=16).digest() if head else None


def size_of(record: Record) -> int:
    """Return roughly how many characters a record has."""
    prompts = [record.prompt or "", *record.prompts]
    messages = sum(len(str(message.get("content"))) for message in record.messages or ())
    return sum(len(passage.text) for passage in record.contexts) + sum(map(len, prompts)) + messages


def _head(record: Record) -> str:
    if record.contexts:
        return record.contexts[record.order[0] if record.order else 0].text
    if record.messages is not None:
        return _long("\0".join(str(message.get("content")) for message in record.messages))
    prompt = record.prompt if record.prompt is not None else next(iter(record.prompts), "")
    if isinstance(prompt, str):
        return _long(prompt)
    return str(prompt[:HEAD_TOKENS]) if len(prompt) > HEAD_TOKENS else ""


def _long(text: str) -> str:
    return text[:HEAD] if len(text) > HEAD else ""


# -- pass ------------------------------------------------------------------------------------------
AHEAD = 512  # records read ahead per worker, so that those of one group meet
AHEAD_SIZE = 64 << 20  # characters of records that are read ahead or leased
SPAN = 50_000  # output lines that may wait for an earlier one


class RayPass:
    """One pass of a session over a source, on a cluster's workers. The session's own runner is not loaded.

    Records of a dead worker are leased again, and late results from it are ignored. Arguments as in LocalPass.
    """

    def __init__(
        self,
        session: Session,
        pool: WorkerPool,
        source: Source,
        journal: Journal,
        *,
        limit: int | None = None,
        total: int | None = None,
        report: Report | None = None,
        observers: Sequence[Observer] = (),
        say: Say = ignore_note,
    ) -> None:
        self._session = session
        self._pool = pool
        shape = NativeFormat() if pool.details else line_format_of(session.config)
        self._writer = ResultWriter(session, source, journal, shape, total, report, observers)
        self._record_reader = RecordReader(session.config, self._writer, source)
        self._ordering = ordering_of(session, source, self._record_reader, limit, say)
        self._tasks = self._ordering.tasks()
        self._leases = Leases()
        self._no_records = f"{session.config.input}: contains no records; nothing to answer"
        self._in_order = session.config.order == "input"
        self._last = 0  # index of the last line that was read
        self._started = 0.0
        self._loaded_at: float | None = None
        self.summary = self._writer.summary
        self._energy = RunEnergy(session.config, self.summary)

    def answer(self) -> None:
        """Start workers if there is anything to answer, answer it, and shut them down."""
        summary = self.summary
        try:
            self._read_ahead()
            if self._leases.waiting:
                self._started = time.perf_counter()
                with self._pool as pool, self._energy:
                    self._stream()
                    pool.shut_down()
        finally:
            self._tasks.close()
            self._add_worker_totals()
        if not (summary.records or summary.failed or summary.skipped):
            summary.notes.append(self._no_records)
        summary.notes += self._record_reader.notes() + self._writer.notes() + self._ordering.notes()

    def stream(self) -> None:
        """Answer the input with workers that are loaded, and time it; another pass may follow."""
        self._started = time.perf_counter()
        try:
            with self._energy:
                self._stream()
            self._pool.end_pass()
        finally:
            self._tasks.close()
            self._add_worker_totals()

    def about(self) -> dict[str, Any]:
        """Return what identifies the run in its statistics. What workers report of their runner takes precedence."""
        return {**self._session.about(), **self._pool.about}

    def _stream(self) -> None:
        """Read, lease and write until every record is settled."""
        pool = self._pool
        self.summary.workers = [handle.summary for handle in pool.handles]
        while self._leases.waiting or self._leases.out or self._read_ahead():
            self._read_ahead()
            pool.load(self._expected_records())
            if self._loaded_at is None and any(handle.summary.alive for handle in pool.handles):
                self._loaded_at = time.perf_counter()
                self.summary.load_s = self._loaded_at - self._started
                self._energy.begin_answering()
            self._send()
            for event in pool.poll_events():
                if isinstance(event, LostWorker):
                    self._handle_death(event)
                else:
                    self.handle_output(event.handle, event.message)

    def _expected_records(self) -> int | None:
        """Return about how many records will come, None if unknown."""
        known = self._writer.expected_rows()
        return None if known is None else max(known, self._leases.waiting + self._leases.out)

    # -- reading -----------------------------------------------------------------------------------

    def _read_ahead(self) -> bool:
        """Read as far ahead as allowed; block only if workers have nothing left. Return whether a record came."""
        leases, read = self._leases, 0
        room = AHEAD * self._pool.scale.workers - leases.waiting
        oldest = leases.oldest
        if self._in_order and oldest is not None:
            room = min(room, oldest + SPAN - self._last)
        while read < room and leases.size < AHEAD_SIZE and (found := self._read_tasks(room - read)):
            for task in found:
                leases.add(task, group_of(task.record), size_of(task.record))
            self._last = found[-1].index
            read += len(found)
        return read > 0

    def _read_tasks(self, most: int) -> list[RecordTask]:
        return self._tasks.take(min(most, AHEAD), wait=not (self._leases.waiting or self._leases.out))

    # -- workers -----------------------------------------------------------------------------------

    def _send(self) -> None:
        """Lease records to workers with short queues; none gets more than its share of what is left."""
        share = -(-(self._leases.waiting + self._leases.out) // max(1, self._pool.active()))
        for handle in self._pool.handles:
            if handle.state != "answering" or "exchange" in handle.refs:
                continue
            wanted = max(0, min(handle.queue_target - handle.waiting, share - self._leases.held(handle.name)))
            taken = self._leases.take(handle.name, wanted)
            handle.filled = len(taken) == wanted
            if not taken and not self._leases.held(handle.name):
                self._rebalance()
            handle.send(taken)

    def _rebalance(self) -> None:
        """Ask the worker with the longest queue to return half of it, since another worker is idle."""
        fullest = max(self._pool.handles, key=lambda handle: handle.waiting)
        if fullest.waiting > 1:
            fullest.request_return(fullest.waiting // 2)

    def handle_output(self, handle: WorkerHandle, message: WorkerMessage) -> None:
        for result in message.lines:
            if self._leases.settle(handle.name, result.index):
                self._writer.put(result)
                handle.summary.count(result.prompt_tokens, result.costs)
        for index, failed in message.failures:
            if self._leases.settle(handle.name, index):
                self._writer.fail(index, failed)
                handle.summary.failed += 1
        if message.returned:
            self._leases.give_back(handle.name, message.returned)
        if self._loaded_at is not None and (message.lines or message.failures):
            self.summary.generate_s = time.perf_counter() - self._loaded_at

    def _handle_death(self, lost: LostWorker) -> None:
        """Lease a dead worker's records again, fail the poisonous ones, and replace the worker."""
        poisonous = self._leases.mark_dead(lost.handle.name, lost.suspicion)
        for task in poisonous:
            message = f"workers died while answering it, the last one because: {lost.why}"
            self._writer.fail(task.index, FailedRecord(task.record.id, task.key, "WorkerError", message))
        self._pool.replace(lost.handle, lost.why, made_progress=bool(poisonous))

    def _add_worker_totals(self) -> None:
        """Add the workers' own measurements to the totals."""
        summary, pool = self.summary, self._pool
        summary.method = pool.method
        summary.notes += [note for note in pool.notes if note not in summary.notes]
        summary.peak_memory_gib = max(handle.summary.peak_memory_gib for handle in pool.handles)
        found = _total_retrieval([handle.retrieval for handle in pool.handles if handle.retrieval])
        summary.retrieval = self._ordering.retrieval() or found


def _total_retrieval(searches: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the summed search statistics of all workers, None if there were no searches."""
    if not searches:
        return None
    return retrieval_statistics(
        searches[0]["mode"], *(sum(each[key] for each in searches) for key in ("queries", "search_s", "waited_s"))
    )
