"""How many rows at once: as many as bring speed, and as fit into memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragspec.machine import free_bytes
from ragspec.records import Request

MOST = {"cpu": 16, "cuda": 128}  # beyond, a step costs in proportion to its rows (docs/performance.md)
SHARE = 0.5  # of free memory that keys and values may take


def most_rows(device: torch.device) -> int:
    """Return the number of rows from which on more bring no more speed."""
    return MOST.get(device.type, 16)


def choose_rows(requests: Sequence[Request], bytes_per_token: int, device: torch.device) -> tuple[int, str]:
    """Return the number of rows for requests like these, and why."""
    slots = max(len(request.token_ids) + request.sampling.max_new_tokens for request in requests)
    most = most_rows(device)
    free = free_on(device)
    fit = max(1, int(free * SHARE) // max(1, slots * bytes_per_token))
    need = f"{slots:,} tokens of {bytes_per_token / 1024:,.0f} KiB a row"
    if fit < most:
        return fit, f"batch_size: auto chose {fit}: {need} fill half of the {free / (1 << 30):.1f} GiB that are free"
    return most, f"batch_size: auto chose {most}: more bring no more speed on this device ({need})"


def free_on(device: torch.device) -> int:
    """Return the memory that is free on `device`."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_bytes()
