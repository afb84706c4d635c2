"""What happens to the rows when a forward runs out of memory: fewer at once, one alone, and later all again."""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.engine.kv.budget import Backoff, KvBudget
from ragspec.engine.model.forward import Model
from ragspec.engine.notes import Notes
from ragspec.engine.proposers.base import Proposer
from ragspec.engine.request_state import RequestState, ScheduledRequest
from ragspec.engine.scheduler import Scheduler
from ragspec.models.memory import free_memory
from ragspec.records import Failure


class OomPolicy:
    """Decides, for one run, how many rows go on after a failure.

    most: places that may be used now. together: rows of one forward.
    """

    def __init__(self, model: Model, proposer: Proposer, room: KvBudget, notes: Notes) -> None:
        self._model = model
        self._proposer = proposer
        self._room = room
        self._notes = notes
        self._rows = Backoff(model.cache.rows)
        self.together = Backoff(model.cache.rows)
        self._suspect: RequestState | None = None  # a row that is tried alone
        self._beside = 0  # places that there were when it failed

    @property
    def most(self) -> int:
        """Places that may be used now."""
        return 1 if self._suspect else self._rows.limit

    def succeeded(self) -> None:
        """A step went well."""
        self._rows.succeeded()

    def finished(self, row: RequestState) -> None:
        """`row` is answered. If it was tried alone, it had failed for want of memory."""
        if row is self._suspect:
            self._suspect = None
            self._rows.failed(self._beside)

    def preempt(self, scheduler: Scheduler, text: str) -> list[Failure]:
        """Go on with half as many rows, the others back in the queue; a row that is alone fails."""
        places = len(scheduler.places)
        failed = []
        if places == 1:
            failed = [self._fail(scheduler, row, text) for row in scheduler.rows()]
        else:
            self._rows.failed(places)
            self._notes.add(f"batch_size: reduced from {places} to {self._rows.limit} rows after {text}")
        self._begin_anew(scheduler, self._rows.limit if places > 1 else 1)
        return failed

    def shrink_batch(self, scheduler: Scheduler, work: Sequence[ScheduledRequest]) -> list[Failure]:
        """Go on with as many rows as there is memory for, now that one of them is so long."""
        longest = max(work, key=lambda item: item.slots)
        places = self._room.rows(longest.slots)
        failed = []
        if places:
            note = f"reduced from {len(scheduler.places)} to {places} rows for a record of {longest.slots} tokens"
            self._notes.add(f"batch_size: {note}")
        else:
            failed = [self._fail(scheduler, longest.row, self._room.why(longest.slots))]
        self._begin_anew(scheduler, max(1, places))
        return failed

    def run_alone(self, scheduler: Scheduler, row: RequestState, text: str) -> list[Failure]:
        """Try a row that failed in a forward of its own without any others; if it is alone already, it fails."""
        if len(scheduler.rows()) == 1:
            self._suspect = None
            return [self._fail(scheduler, row, text)]
        self._suspect, self._beside = row, len(scheduler.places)
        self._begin_anew(scheduler, 1, first=row)
        return []

    def _fail(self, scheduler: Scheduler, row: RequestState, text: str) -> Failure:
        scheduler.release(row)
        self._proposer.finish(row)
        return Failure(row.request.index, text)

    def _begin_anew(self, scheduler: Scheduler, places: int, first: RequestState | None = None) -> None:
        """Send all rows back to the queue, and have an empty cache of `places` rows."""
        scheduler.interrupt(places, first)
        self._model.resize(places)
        self._proposer.resize(places)
        free_memory()
