"""A run on many workers: this process reads rows, leases records, and writes the lines that come back.

What a dead worker had is leased again; whatever it may still say is not listened to.
"""

from __future__ import annotations

import time
from typing import Any

from ragspec.inputs.base import Source
from ragspec.outputs.answers import Failed, Native
from ragspec.outputs.journal import Journal
from ragspec.outputs.shapes import shape_of
from ragspec.retrieval.stage import told
from ragspec.run.answering import Asked
from ragspec.run.desk import Desk, Report
from ragspec.run.intake import Intake
from ragspec.run.ordering import Say, ordering_of, unheard
from ragspec.run.ray.affinity import group_of, size_of
from ragspec.run.ray.crew import Crew, Lost
from ragspec.run.ray.hand import Hand
from ragspec.run.ray.leases import Leases
from ragspec.run.ray.messages import Word
from ragspec.run.session import Session

AHEAD = 512  # records per worker that are read ahead, so that those which belong together meet
AHEAD_SIZE = 64 << 20  # characters of them, and of those that workers have
SPAN = 50_000  # lines that may wait for an earlier one


class RayPass:
    """One pass of a session over a source, on a cluster's workers. The session's own runner is not loaded."""

    def __init__(
        self,
        session: Session,
        crew: Crew,
        source: Source,
        journal: Journal,
        *,
        limit: int | None = None,
        total: int | None = None,
        report: Report | None = None,
        say: Say = unheard,
    ) -> None:
        self._session = session
        self._crew = crew
        shape = Native() if crew.details else shape_of(session.config)
        self._desk = Desk(session, source, journal, shape, total, report)
        self._intake = Intake(session.config, self._desk, source)
        self._ordering = ordering_of(session, source, self._intake, limit, say)
        self._asked = self._ordering.asked()
        self._leases = Leases()
        self._none = f"{session.config.input}: contains no records; nothing to answer"
        self._in_order = session.config.order == "input"
        self._last = 0  # line that was read
        self._started = 0.0
        self._loaded_at: float | None = None
        self.summary = self._desk.summary

    def answer(self) -> None:
        """Start workers if there is anything to answer, let them answer it, and let them go."""
        summary = self.summary
        try:
            self._read_ahead()
            if self._leases.waiting:
                self._started = time.perf_counter()
                with self._crew as crew:
                    self._stream()
                    crew.end()
        finally:
            self._asked.close()
            self._conclude()
        if not (summary.records or summary.failed or summary.skipped):
            summary.notes.append(self._none)
        summary.notes += self._intake.notes() + self._desk.notes() + self._ordering.notes()

    def stream(self) -> None:
        """Answer the input with workers that are loaded, and time it; another pass may follow."""
        self._started = time.perf_counter()
        try:
            self._stream()
            self._crew.rest()
        finally:
            self._asked.close()
            self._conclude()

    def about(self) -> dict[str, Any]:
        """Return what identifies the run in its statistics: what workers said of their runner goes first."""
        return {**self._session.about(), **self._crew.about}

    def _stream(self) -> None:
        """Read, lease, and write what comes, until all is settled."""
        crew = self._crew
        self.summary.workers = [hand.summary for hand in crew.hands]
        while self._leases.waiting or self._leases.out or self._read_ahead():
            self._read_ahead()
            crew.load(self._to_come())
            if self._loaded_at is None and any(hand.summary.alive for hand in crew.hands):
                self._loaded_at = time.perf_counter()
                self.summary.load_s = self._loaded_at - self._started
            self._send()
            for event in crew.listen():
                if isinstance(event, Lost):
                    self._bury(event)
                else:
                    self.hear(event.hand, event.word)

    def _to_come(self) -> int | None:
        """Return how many records will come, about; None if nobody knows."""
        known = self._desk.to_come()
        return None if known is None else max(known, self._leases.waiting + self._leases.out)

    # -- what is read -------------------------------------------------------------------------------------------------

    def _read_ahead(self) -> bool:
        """Read as far as there is room; wait for a record if workers have none. Return whether one came."""
        leases, read = self._leases, 0
        room = AHEAD * self._crew.scale.workers - leases.waiting
        oldest = leases.oldest
        if self._in_order and oldest is not None:
            room = min(room, oldest + SPAN - self._last)
        while read < room and leases.size < AHEAD_SIZE and (found := self._take_some(room - read)):
            for asked in found:
                leases.add(asked, group_of(asked.record), size_of(asked.record))
            self._last = found[-1].index
            read += len(found)
        return read > 0

    def _take_some(self, most: int) -> list[Asked]:
        return self._asked.take(min(most, AHEAD), wait=not (self._leases.waiting or self._leases.out))

    # -- what goes to workers and comes back --------------------------------------------------------------------------

    def _send(self) -> None:
        """Lease records to workers that have few waiting; none gets more than its share of what is left."""
        share = -(-(self._leases.waiting + self._leases.out) // max(1, self._crew.able()))
        for hand in self._crew.hands:
            if hand.state != "answering" or "exchange" in hand.refs:
                continue
            wanted = max(0, min(hand.wants - hand.waiting, share - self._leases.held(hand.name)))
            taken = self._leases.take(hand.name, wanted)
            hand.got_all = len(taken) == wanted
            if not taken and not self._leases.held(hand.name):
                self._ask_back()
            hand.send(taken)

    def _ask_back(self) -> None:
        """Ask the worker with the most records that it has not begun for half of them: another one is idle."""
        fullest = max(self._crew.hands, key=lambda hand: hand.waiting)
        if fullest.waiting > 1:
            fullest.ask_back(fullest.waiting // 2)

    def hear(self, hand: Hand, word: Word) -> None:
        for answered in word.lines:
            if self._leases.settle(hand.name, answered.index):
                self._desk.put(answered)
                hand.summary.count(answered.prompt_tokens, answered.costs)
        for index, failed in word.failures:
            if self._leases.settle(hand.name, index):
                self._desk.fail(index, failed)
                hand.summary.failed += 1
        if word.returned:
            self._leases.give_back(hand.name, word.returned)
        if self._loaded_at is not None and (word.lines or word.failures):
            self.summary.generate_s = time.perf_counter() - self._loaded_at

    def _bury(self, lost: Lost) -> None:
        """Lease again what a dead worker had, and replace it."""
        guilty = self._leases.bury(lost.hand.name, lost.suspicion)
        for asked in guilty:
            message = f"workers died while answering it, the last one because: {lost.why}"
            self._desk.fail(asked.index, Failed(asked.record.id, asked.key, "WorkerError", message))
        self._crew.replace(lost.hand, lost.why, fruitful=bool(guilty))

    def _conclude(self) -> None:
        """Add to the totals what workers know of themselves."""
        summary, crew = self.summary, self._crew
        summary.method = crew.method
        summary.notes += [note for note in crew.notes if note not in summary.notes]
        summary.peak_memory_gib = max(hand.summary.peak_memory_gib for hand in crew.hands)
        found = _together([hand.retrieval for hand in crew.hands if hand.retrieval])
        summary.retrieval = self._ordering.retrieval() or found


def _together(searches: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what all workers' searches took, None if there were none."""
    if not searches:
        return None
    return told(
        searches[0]["mode"], *(sum(each[key] for each in searches) for key in ("queries", "search_s", "waited_s"))
    )
