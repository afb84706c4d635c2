"""Where the seconds of a run went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ragspec.engine.row import reach_of
from ragspec.engine.work import Work
from ragspec.speculation.cost import StepCost


@dataclass(slots=True)
class Clock:
    """Where the seconds went. A step that decodes and computes prompts is split between the two by its tokens."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0
    drafting_s: float = 0.0  # within the two
    masks_s: float = 0.0  # of grammars; within the two
    steps: int = 0  # of decode
    drafted_steps: int = 0
    prompt_tokens: int = 0  # computed, prefixes of other rows not counted


class StepTimer:
    """One step, timed from its construction on."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._begun = self._drafted = self._started

    def begun(self) -> None:
        """Say that new rows have their places and drafts are made now."""
        self._begun = time.perf_counter()

    def drafted(self) -> None:
        """Say that the drafts are made and the forward begins."""
        self._drafted = time.perf_counter()

    def count(self, work: Sequence[Work], written: int, clock: Clock, cost: StepCost | None) -> float:
        """Take the step, which ends now, into `clock` and `cost`; return its seconds.

        written: tokens that the decoding rows' answers grew by.
        """
        ended = time.perf_counter()
        spent = ended - self._started
        decoding = [item for item in work if item.decodes]
        tokens = sum(len(item.token_ids) for item in decoding)
        prefill = sum(len(item.token_ids) for item in work) - tokens
        if not tokens + prefill:
            return spent
        share = tokens / (tokens + prefill)
        clock.drafting_s += self._drafted - self._begun
        clock.prompt_tokens += prefill
        clock.decode_s += share * spent
        clock.prefill_s += (1 - share) * spent
        clock.decode_tokens += written
        if not decoding:
            return spent
        clock.steps += 1
        clock.drafted_steps += any(item.draft.token_ids for item in decoding)
        if cost is not None and prefill:
            cost.observe_beside(tokens + prefill, ended - self._drafted)
        elif cost is not None:
            cost.observe(tokens, len(decoding), reach_of([item.row for item in decoding]), ended - self._drafted)
        return spent
