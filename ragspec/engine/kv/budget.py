"""Memory for the KV cache: how many rows of how many tokens fit, how many rows pay, and how to back off after OOM.

>>> room = KvBudget(bytes_per_token=1000, budget=64_000_000); room.rows(8000), room.slots(4)
(8, 16000)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ragspec.host.machine import free_bytes, memory_bytes
from ragspec.records import Request

AHEAD = 1.5  # a cache may grow to this many times the slots needed
PATIENCE = 16  # steps without a failure before the limit is raised; doubled when raising it fails


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Memory for keys and values. budget: bytes, None for unlimited. block: a row takes whole blocks of tokens."""

    bytes_per_token: int = 0
    budget: int | None = None
    block: int = 1

    def rows(self, slots: int) -> int:
        """Return how many rows of `slots` tokens fit."""
        if self.budget is None or not self.bytes_per_token:
            return 1 << 30
        slots = -(-max(1, slots) // self.block) * self.block
        return self.budget // (slots * self.bytes_per_token)

    def slots(self, rows: int) -> int:
        """Return how many tokens each of `rows` rows may have."""
        if self.budget is None or not self.bytes_per_token:
            return 1 << 62
        slots = self.budget // (max(1, rows) * self.bytes_per_token)
        return slots // self.block * self.block

    def ahead(self, slots: int, rows: int, prompt: int, coming: int) -> int:
        """Return how many slots to reserve per row if `slots` are needed, 0 if they do not fit.

        Growing a cache copies it, so it grows for coming rows too: their longest prompt has `prompt` tokens, and with
        its answer a row may need up to `coming`, though few do. A single row gets only what it needs, since it must not
        fail because of others.
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
    """A limit that halves on failure and doubles again after calm; starts at `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = most
        self._calm = 0
        self._patience = PATIENCE
        self._daring = False  # whether the last change raised the limit

    def failed(self, count: int) -> None:
        """Halve the limit, since `count` at once were too many."""
        if self._daring:
            self._patience *= 2
        self.limit = max(1, min(self.limit, count) // 2)
        self._calm, self._daring = 0, False

    def succeeded(self) -> None:
        """Count a step without failure."""
        self._calm += 1
        if self._calm >= self._patience:
            self._calm, self._daring = 0, self.limit < self.most
            self.limit = min(self.most, self.limit * 2)


# -- batch size ------------------------------------------------------------------------------------
FEWEST, MOST, MOST_CUDA = 16, 128, 256  # rows, if memory allows
PAYS = 1.25  # times the tokens per second that make twice the rows, and twice their memory, worthwhile
SHARE = 0.5  # of free memory, for keys and values
SHARE_POOL = 0.8  # the same for a pool of blocks, which never moves
KEPT = 8  # the machine's memory is at least this many times the KV memory kept between runs
TYPICAL = 0.9  # share of the sampled requests that fit the chosen row size


def untimed_rows(device: torch.device) -> int:
    """Return the number of rows where steps are not timed.

    CUDA devices never time them: they compute far more rows in the time in which they read the weights.
    """
    return MOST_CUDA if device.type == "cuda" else FEWEST


def most_rows(device: torch.device, limit: int, step: Callable[[int], float]) -> int:
    """Return the number of rows beyond which speed hardly grows.

    limit: rows that records and memory allow. step: returns the seconds of a step of so many rows.
    """
    rows = untimed_rows(device)
    limit = min(limit, max(rows, MOST))
    seconds = step(rows) if rows < limit else 0.0
    while rows < limit:
        more = step(2 * rows)
        if 2 * seconds < PAYS * more:
            break
        rows, seconds = 2 * rows, more
    return rows


def budget_of(device: torch.device, kept: int = 0, share: float = SHARE) -> int:
    """Return the bytes that the KV cache may take on `device`. kept: bytes that it holds already."""
    return int((free_on(device) + kept) * share)


def budget_over(budgets: Mapping[torch.device, int], sizes: Mapping[torch.device, int]) -> int:
    """Return the bytes that the KV cache may take on all devices together: every token is on all of them.

    budgets: what it may take on each. sizes: bytes of one token there.
    """
    token = sum(sizes.values())
    return min(budgets[device] * token // size for device, size in sizes.items())


def keepable(device: torch.device) -> int:
    """Return the bytes to keep between runs: the system gives new memory slowly, on some machines at 0.5 s/GB.

    0 on a GPU, where torch itself keeps them.
    """
    return memory_bytes() // KEPT if device.type == "cpu" else 0


def choose_rows(
    requests: Sequence[Request], room: KvBudget, most: int, *, all_at_once: bool = False
) -> tuple[int, str]:
    """Return the number of rows for requests like these, and why. A few long ones are ignored.

    most: rows beyond which speed hardly grows. all_at_once: whether that limit is the number of records.
    """
    needs = sorted(request.most_tokens for request in requests)
    slots = needs[int(TYPICAL * (len(needs) - 1))]
    fit = max(1, room.rows(slots))
    need = f"rows of {slots:,} tokens, {room.bytes_per_token / 1024:,.0f} KiB per token"
    if fit < most:
        budget = (room.budget or 0) / (1 << 30)
        why = f"which fills the {budget:.1f} GiB available for the KV cache"
        return fit, f"batch_size: auto chose {fit}, {why} ({need})"
    why = "there are no more records" if all_at_once else "a larger batch would be little faster"
    return most, f"batch_size: auto chose {most}: {why} ({need})"


def free_on(device: torch.device) -> int:
    """Return the free memory of `device` in bytes."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_bytes()
