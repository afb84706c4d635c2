"""What records share with others, so that one worker gets them all: its cache has their prefix, its drafts their words.

>>> group_of(Record("q1", query="Who wrote it?", contexts=(Passage("1", "Ann wrote it."),)))
b'...'
"""

from __future__ import annotations

import time
from hashlib import blake2b
from typing import Any

from ragspec.inputs.base import Source
from ragspec.outputs.answers import FailedRecord, NativeFormat
from ragspec.outputs.journal import Journal
from ragspec.outputs.openai_batch import line_format_of
from ragspec.records import Record
from ragspec.retrieval.stage import retrieval_statistics
from ragspec.run.answering import RecordTask
from ragspec.run.ordering import Say, ignore_note, ordering_of
from ragspec.run.ray.leases import Leases
from ragspec.run.ray.messages import WorkerMessage
from ragspec.run.ray.worker_pool import LostWorker, WorkerHandle, WorkerPool
from ragspec.run.record_reader import RecordReader
from ragspec.run.result_writer import Report, ResultWriter
from ragspec.run.session import Session

HEAD = 1024  # characters at the begin of a prompt without passages; what is shorter is not worth sharing
HEAD_TOKENS = 256


def group_of(record: Record) -> bytes | None:
    """Return what names the group of records that begin alike; None for a record that hardly shares anything."""
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


# -- a run on many workers: this process reads rows, leases records, and writes the lines that come back --------------
#
# What a dead worker had is leased again; whatever it may still say is not listened to.


AHEAD = 512  # records per worker that are read ahead, so that those which belong together meet
AHEAD_SIZE = 64 << 20  # characters of them, and of those that workers have
SPAN = 50_000  # lines that may wait for an earlier one


class RayPass:
    """One pass of a session over a source, on a cluster's workers. The session's own runner is not loaded."""

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
        say: Say = ignore_note,
    ) -> None:
        self._session = session
        self._pool = pool
        shape = NativeFormat() if pool.details else line_format_of(session.config)
        self._writer = ResultWriter(session, source, journal, shape, total, report)
        self._record_reader = RecordReader(session.config, self._writer, source)
        self._ordering = ordering_of(session, source, self._record_reader, limit, say)
        self._asked = self._ordering.asked()
        self._leases = Leases()
        self._none = f"{session.config.input}: contains no records; nothing to answer"
        self._in_order = session.config.order == "input"
        self._last = 0  # line that was read
        self._started = 0.0
        self._loaded_at: float | None = None
        self.summary = self._writer.summary

    def answer(self) -> None:
        """Start workers if there is anything to answer, let them answer it, and let them go."""
        summary = self.summary
        try:
            self._read_ahead()
            if self._leases.waiting:
                self._started = time.perf_counter()
                with self._pool as pool:
                    self._stream()
                    pool.end()
        finally:
            self._asked.close()
            self._conclude()
        if not (summary.records or summary.failed or summary.skipped):
            summary.notes.append(self._none)
        summary.notes += self._record_reader.notes() + self._writer.notes() + self._ordering.notes()

    def stream(self) -> None:
        """Answer the input with workers that are loaded, and time it; another pass may follow."""
        self._started = time.perf_counter()
        try:
            self._stream()
            self._pool.rest()
        finally:
            self._asked.close()
            self._conclude()

    def about(self) -> dict[str, Any]:
        """Return what identifies the run in its statistics: what workers said of their runner goes first."""
        return {**self._session.about(), **self._pool.about}

    def _stream(self) -> None:
        """Read, lease, and write what comes, until all is settled."""
        pool = self._pool
        self.summary.workers = [handle.summary for handle in pool.handles]
        while self._leases.waiting or self._leases.out or self._read_ahead():
            self._read_ahead()
            pool.load(self._to_come())
            if self._loaded_at is None and any(handle.summary.alive for handle in pool.handles):
                self._loaded_at = time.perf_counter()
                self.summary.load_s = self._loaded_at - self._started
            self._send()
            for event in pool.poll_events():
                if isinstance(event, LostWorker):
                    self._mark_dead(event)
                else:
                    self.take_output(event.handle, event.word)

    def _to_come(self) -> int | None:
        """Return how many records will come, about; None if nobody knows."""
        known = self._writer.to_come()
        return None if known is None else max(known, self._leases.waiting + self._leases.out)

    # -- what is read -------------------------------------------------------------------------------------------------

    def _read_ahead(self) -> bool:
        """Read as far as there is room; wait for a record if workers have none. Return whether one came."""
        leases, read = self._leases, 0
        room = AHEAD * self._pool.scale.workers - leases.waiting
        oldest = leases.oldest
        if self._in_order and oldest is not None:
            room = min(room, oldest + SPAN - self._last)
        while read < room and leases.size < AHEAD_SIZE and (found := self._take_some(room - read)):
            for asked in found:
                leases.add(asked, group_of(asked.record), size_of(asked.record))
            self._last = found[-1].index
            read += len(found)
        return read > 0

    def _take_some(self, most: int) -> list[RecordTask]:
        return self._asked.take(min(most, AHEAD), wait=not (self._leases.waiting or self._leases.out))

    # -- what goes to workers and comes back --------------------------------------------------------------------------

    def _send(self) -> None:
        """Lease records to workers that have few waiting; none gets more than its share of what is left."""
        share = -(-(self._leases.waiting + self._leases.out) // max(1, self._pool.able()))
        for handle in self._pool.handles:
            if handle.state != "answering" or "exchange" in handle.refs:
                continue
            wanted = max(0, min(handle.wants - handle.waiting, share - self._leases.held(handle.name)))
            taken = self._leases.take(handle.name, wanted)
            handle.got_all = len(taken) == wanted
            if not taken and not self._leases.held(handle.name):
                self._ask_back()
            handle.send(taken)

    def _ask_back(self) -> None:
        """Ask the worker with the most records that it has not begun for half of them: another one is idle."""
        fullest = max(self._pool.handles, key=lambda handle: handle.waiting)
        if fullest.waiting > 1:
            fullest.ask_back(fullest.waiting // 2)

    def take_output(self, handle: WorkerHandle, word: WorkerMessage) -> None:
        for answered in word.lines:
            if self._leases.settle(handle.name, answered.index):
                self._writer.put(answered)
                handle.summary.count(answered.prompt_tokens, answered.costs)
        for index, failed in word.failures:
            if self._leases.settle(handle.name, index):
                self._writer.fail(index, failed)
                handle.summary.failed += 1
        if word.returned:
            self._leases.give_back(handle.name, word.returned)
        if self._loaded_at is not None and (word.lines or word.failures):
            self.summary.generate_s = time.perf_counter() - self._loaded_at

    def _mark_dead(self, lost: LostWorker) -> None:
        """Lease again what a dead worker had, and replace it."""
        poisonous = self._leases.mark_dead(lost.handle.name, lost.suspicion)
        for asked in poisonous:
            message = f"workers died while answering it, the last one because: {lost.why}"
            self._writer.fail(asked.index, FailedRecord(asked.record.id, asked.key, "WorkerError", message))
        self._pool.replace(lost.handle, lost.why, fruitful=bool(poisonous))

    def _conclude(self) -> None:
        """Add to the totals what workers know of themselves."""
        summary, pool = self.summary, self._pool
        summary.method = pool.method
        summary.notes += [note for note in pool.notes if note not in summary.notes]
        summary.peak_memory_gib = max(handle.summary.peak_memory_gib for handle in pool.handles)
        found = _together([handle.retrieval for handle in pool.handles if handle.retrieval])
        summary.retrieval = self._ordering.retrieval() or found


def _together(searches: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what all workers' searches took, None if there were none."""
    if not searches:
        return None
    return retrieval_statistics(
        searches[0]["mode"], *(sum(each[key] for each in searches) for key in ("queries", "search_s", "waited_s"))
    )
