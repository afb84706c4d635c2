"""The model's own first layers draft for all rows at once, on the target's keys and values.

    speculation: {method: early_exit, early_exit_layer: 8}

What they computed of a draft is not computed again when it is verified (halves.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragspec.engine.draft_model import DraftModel
from ragspec.engine.forward import Model
from ragspec.engine.halves import Halves
from ragspec.engine.layout import Segment
from ragspec.engine.row import Row
from ragspec.engine.scripts import Same, Script
from ragspec.speculation.cost import Cost


class EarlyExit(DraftModel):
    """The proposer. width: the model's vocabulary."""

    def __init__(self, model: Model, halves: Halves, width: int, num_tokens: int | None, cost: Cost | None) -> None:
        super().__init__(model, width, None, num_tokens, cost)
        self._halves = halves

    def resize(self, rows: int) -> None:
        self._begin_anew()

    def widen(self, rows: int) -> None: ...

    def forget(self) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._halves.forget()
        self._scripts, self._held, self._sketches = {}, {}, {}

    def finish(self, row: Row) -> None:
        self._scripts.pop(row.place, None)

    def _left(self, row: Row) -> int:
        """Return for how many tokens the cache has room: it grows by what the engine decides, not by drafts."""
        return self._model.cache.slots - len(row.tokens)

    def _missing(self, row: Row) -> int:
        return 1

    def _script(self, row: Row) -> Script:
        script = self._scripts[row.place] = Same(row)
        self._held[row.place] = row.tokens[:-1]
        return script

    def _compute(self, segments: list[Segment], token_ids: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
        return self._halves.guess(segments, token_ids, wanted)
