"""What is judged: a model's config, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Entry:
    """One config. settings: what it has beside tiny.SMALL. generation: what its generation_config asks for."""

    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Who answers, why not the engine, and how that differs from stock generate(): a fault, or "".

    ties: records that part from stock generate() where it finds two tokens equally likely. captured: whether its layers
    answer as graphs too. halves: whether its first layer can draft for it. fused: whether our own kernels were asked to
    run its layers, and did. sdpa, flex: "exact" where the engine answers the same with that attention (flex: over a
    cache in blocks, each step run on the buffers that a GPU would capture), else why it is not used.
    """

    by: Literal["engine", "stock"]
    why: str = ""
    fault: str = ""
    ties: int = 0
    captured: bool = False
    halves: bool = False
    fused: bool = False
    sdpa: str = ""
    flex: str = ""
