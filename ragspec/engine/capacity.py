"""How many rows at once: as many as add speed, which all but CUDA devices are timed for, and fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ragspec.engine.room import Room
from ragspec.host.machine import free_bytes, memory_bytes
from ragspec.records import Request

FEWEST, MOST = 16, 128  # rows, where memory allows them
PAYS = 1.25  # times the tokens a second, from which on twice the rows, and twice their memory, are worth it
SHARE = 0.5  # of free memory, for keys and values
KEPT = 8  # times as much memory the machine has as keys and values keep; not of what is free, which changes
TYPICAL = 0.9  # share of the requests looked at that fit the row size chosen


def untimed_rows(device: torch.device) -> int:
    """Return the number of rows where steps were not timed.

    CUDA devices never are: they compute far more rows in the time in which they read the weights.
    """
    return MOST if device.type == "cuda" else FEWEST


def most_rows(device: torch.device, limit: int, step: Callable[[int], float]) -> int:
    """Return the number of rows beyond which more would add little speed.

    limit: rows that there are records or memory for. step: returns the seconds of a step of so many rows.
    """
    rows, limit = untimed_rows(device), min(limit, MOST)
    seconds = step(rows) if rows < limit else 0.0
    while rows < limit:
        more = step(2 * rows)
        if 2 * seconds < PAYS * more:
            break
        rows, seconds = 2 * rows, more
    return rows


def budget_of(device: torch.device, kept: int = 0) -> int:
    """Return the bytes that keys and values may take on `device`, where they have `kept` already."""
    return int((free_on(device) + kept) * SHARE)


def keepable(device: torch.device) -> int:
    """Return the bytes that may be kept between runs: systems give new memory slowly, some machines at 0.5 s/GB.

    On a GPU torch itself keeps them.
    """
    return memory_bytes() // KEPT if device.type == "cpu" else 0


def choose_rows(
    requests: Sequence[Request], room: Room, device: torch.device, most: int, *, all_at_once: bool = False
) -> tuple[int, str]:
    """Return the number of rows for requests like these, and why. A few long ones do not count.

    most: rows beyond which more would add little speed. all_at_once: because there are no more records.
    """
    needs = sorted(len(request.token_ids) + request.sampling.max_new_tokens for request in requests)
    slots = needs[int(TYPICAL * (len(needs) - 1))]
    fit = max(1, room.rows(slots))
    need = f"rows of {slots:,} tokens, {room.bytes_per_token / 1024:,.0f} KiB per token"
    if fit < most:
        free = (room.budget or 0) / SHARE / (1 << 30)
        return fit, f"batch_size: auto chose {fit}, which fill half of the {free:.1f} GiB that are free ({need})"
    why = "there are no more records" if all_at_once else "more would add little speed here"
    return most, f"batch_size: auto chose {most}: {why} ({need})"


def free_on(device: torch.device) -> int:
    """Return the memory that is free on `device`."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_bytes()
