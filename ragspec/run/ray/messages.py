"""What driver and workers say to each other, and records and lines as bytes.

pickle asks a dataclass for its state in Python, which costs more than all else about a message: here each is its
class and its fields.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from io import BytesIO
from operator import attrgetter
from typing import Any

from ragspec.outputs.answers import Failed
from ragspec.records import Passage, Record
from ragspec.run.answering import Answered, Asked
from ragspec.stats import SpecStats

Reduction = Callable[[Any], tuple[type, tuple[Any, ...]]]


@dataclass(slots=True)
class Place:
    """Where a worker is, and what is installed there. node: Ray's name of it. problem: why it cannot work."""

    host: str
    node: str
    python: str
    versions: dict[str, str]
    problem: str = ""
    identity: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Word:
    """What a worker says each time it is asked.

    waiting: records that its runner has not taken. dry: whether the runner ran out of them. returned: lines of records
    that it gives up. state: loading, answering or ended.
    """

    lines: list[Answered]
    failures: list[tuple[int, Failed]]
    waiting: int
    dry: bool
    returned: list[int]
    state: str


@dataclass(slots=True)
class Report:
    """What a worker can tell of itself once its model is loaded. Seconds are its own."""

    method: str = "none"
    load_s: float = 0.0
    warmup_s: float = 0.0
    prefill_s: float | None = None
    decode_s: float | None = None
    decode_tokens: int = 0
    peak_memory_gib: float = 0.0
    retrieval: dict[str, Any] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def pack(message: Any) -> bytes:
    """Return a message as bytes: builtin types, and the dataclasses that travel."""
    found = BytesIO()
    _Pickler(found, pickle.HIGHEST_PROTOCOL).dump(message)
    return found.getvalue()


def unpack(packed: bytes) -> Any:
    """Return the message that `pack` was given."""
    return pickle.loads(packed)  # noqa: S301 - what Ray itself would do: both ends are ragspec


def _by_fields(kind: type) -> Reduction:
    values = attrgetter(*(each.name for each in fields(kind)))
    return lambda found: (kind, values(found))


class _Pickler(pickle.Pickler):
    dispatch_table = {kind: _by_fields(kind) for kind in (Asked, Record, Passage, Answered, SpecStats, Failed, Word)}
