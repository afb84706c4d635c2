"""What the benchmark and a candidate's process say to each other, a JSON line each.

In: a Task, then "go" per pass, or "details", with a profile or without.
Out: {"value": Ready, Pass or Details}, or {"error", "exit_code"}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GO, DETAILS, PROFILE = b"go", b"details", b"details with a profile"


@dataclass(frozen=True, slots=True)
class Task:
    """What a process is to do. config: as the user wrote it, secrets in the clear."""

    name: str
    config: dict[str, Any]
    limit: int | None
    output: str


@dataclass(frozen=True, slots=True)
class Ready:
    """What a process says of itself once its model is loaded. about: as in a stats file.

    remembers: whether a pass leaves drafts behind for the next one.
    """

    about: dict[str, Any]
    load_s: float
    warmup_s: float
    notes: tuple[str, ...]
    remembers: bool
