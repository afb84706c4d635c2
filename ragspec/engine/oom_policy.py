"""What happens to rows when a forward runs out of memory: smaller batches, one row alone, and later full ones again."""

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
    """Decides, for one run, how many rows continue after a failure. together: rows per forward."""

    def __init__(self, model: Model, proposer: Proposer, room: KvBudget, notes: Notes) -> None:
        self._model = model
        self._proposer = proposer
        self._room = room
        self._notes = notes
        self._rows = Backoff(model.cache.rows)
        self.together = Backoff(model.cache.rows)
        self._suspect: RequestState | None = None  # a row that is retried alone
        self._beside = 0  # slots in use when it failed

    @property
    def most(self) -> int:
        """Slots that may be used now."""
        return 1 if self._suspect else self._rows.limit

    def succeeded(self) -> None:
        """Count a step without failure."""
        self._rows.succeeded()

    def finished(self, row: RequestState) -> None:
        """Note a finished row. If it was retried alone, its first failure was due to the batch size."""
        if row is self._suspect:
            self._suspect = None
            self._rows.failed(self._beside)

    def preempt(self, scheduler: Scheduler, text: str) -> list[Failure]:
        """Halve the number of rows and preempt all of them; a row that was alone fails."""
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
        """Continue with as many rows as fit, now that one of them is so long."""
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

    def refuse(self, scheduler: Scheduler, row: RequestState) -> list[Failure]:
        """Fail a row that needs more memory than there is."""
        return [self._fail(scheduler, row, self._room.why(len(row.tokens)))]

    def run_alone(self, scheduler: Scheduler, row: RequestState, text: str) -> list[Failure]:
        """Retry a row alone after its own forward failed; if it was alone already, it fails."""
        if len(scheduler.places) == 1:  # rows that finished in this step, or left a prefix, had memory beside it
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
        """Preempt all rows, and start with an empty cache of `places` rows."""
        scheduler.interrupt(places, first)
        self._model.resize(places)
        self._proposer.resize(places)
        free_memory()
