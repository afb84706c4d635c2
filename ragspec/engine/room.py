"""How many rows of how many tokens there is memory for, and how to go on after memory ran out. Pure.

>>> room = Room(bytes_per_token=1000, budget=64_000_000); room.rows(8000), room.slots(4)
(8, 16000)
"""

from __future__ import annotations

from dataclasses import dataclass

AHEAD = 1.5  # times the slots needed for sure that a cache may grow to at once
PATIENCE = 16  # steps without a failure before more is tried; doubled whenever such a try fails


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for keys and values. budget None: as much as is asked for."""

    bytes_per_token: int = 0
    budget: int | None = None

    def rows(self, slots: int) -> int:
        """Return how many rows of `slots` tokens fit."""
        if self.budget is None or not self.bytes_per_token:
            return 1 << 30
        return self.budget // (max(1, slots) * self.bytes_per_token)

    def slots(self, rows: int) -> int:
        """Return how many tokens each of `rows` rows may have."""
        if self.budget is None or not self.bytes_per_token:
            return 1 << 62
        return self.budget // (max(1, rows) * self.bytes_per_token)

    def ahead(self, slots: int, rows: int, prompt: int, coming: int) -> int:
        """Return how many slots to reserve for each of `rows` rows where `slots` are needed, 0 where they do not fit.

        Growing a cache copies it, so it grows at once for the rows that come next too: their longest prompt has
        `prompt` tokens, and with its answer a row may need up to `coming`, though few do. Not for a row that is alone,
        which must not fail for what others need.
        """
        most = self.slots(rows)
        if slots > most:
            return 0
        return slots if rows == 1 else max(slots, min(int(AHEAD * max(slots, prompt)), coming, most))

    def why(self, slots: int) -> str:
        """Return why a record of `slots` tokens is refused."""
        need, budget = slots * self.bytes_per_token / (1 << 30), (self.budget or 0) / (1 << 30)
        return f"{slots:,} tokens need {need:.1f} GiB of keys and values; {budget:.1f} GiB may be used here"


class Backoff:
    """How many of something at once: halved by each failure, doubled again after calm; `most` to begin with."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = most
        self._calm = 0
        self._patience = PATIENCE
        self._daring = False  # whether the last change was to try more

    def failed(self, count: int) -> None:
        """Halve the limit: `count` at once were too many."""
        if self._daring:
            self._patience *= 2
        self.limit = max(1, min(self.limit, count) // 2)
        self._calm, self._daring = 0, False

    def succeeded(self) -> None:
        """Count a step that went well."""
        self._calm += 1
        if self._calm >= self._patience:
            self._calm, self._daring = 0, self.limit < self.most
            self.limit = min(self.most, self.limit * 2)
