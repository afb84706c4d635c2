"""Early exit: the model's own first layers draft for all rows at once, on the target's KV cache.

    speculation: {method: early_exit, early_exit_layer: 8}

    >>> split = LayerSplit(model, layers=8)
    >>> split.guess([Segment(0, 7, 1)], [42], [0])  # logits after the first 8 layers and the final norm
    >>> model.logits([Segment(0, 7, 4)], [42, *draft], range(4))  # computes only the other layers of token 42

Keys and values of the first layers are written once, and their output for a draft is reused when it is verified.
Source: self-speculative decoding of LayerSkip, arXiv:2404.16710. Limit: layers pass on a single tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ragspec.engine.kv.common_prefix import shared
from ragspec.engine.model.forward import Model
from ragspec.engine.model.kv_splits import PrefixGroup
from ragspec.engine.model.layout import Segment
from ragspec.engine.model.self_check import relative, token_ids
from ragspec.engine.proposers.draft_model import DraftModel, DraftView, SameTokensView
from ragspec.engine.request_state import RequestState
from ragspec.speculation.step_cost import Cost

TEXT, TRIED = 24, 8  # tokens of the check; how many of them are drafted from


@dataclass(slots=True)
class PartialForward:
    """Tokens of a row that passed the first layers, from slot `start` on. hidden: (tokens, size), their output."""

    start: int
    token_ids: list[int]
    hidden: torch.Tensor


class LayerSplit:
    """Splits the forwards of `model` while it exists. layers: of the first part. check() tells whether it is exact."""

    def __init__(self, model: Model, layers: int) -> None:
        self._model = model
        self._layers = layers
        self._list = _list_of(model)
        self._attends = 0  # layers of the first part that write keys and values
        self._begun: dict[int, PartialForward] = {}  # by row
        self._tuples = False  # whether layers return a tuple
        self._hidden = torch.empty(0)
        model.halves = self

    def guess(self, segments: Sequence[Segment], ids: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
        """Return the logits, (wanted, vocab), after the first layers; keep their output."""
        with self._first():
            logits = self._model.whole(list(segments), ids, wanted)
        self._attends = self._model.cache.attended
        at = 0
        for segment in segments:
            tokens, hidden = list(ids[at : at + segment.count]), self._hidden[at : at + segment.count]
            begun = self._begun.get(segment.row)
            if begun is not None and begun.start + len(begun.token_ids) == segment.start:
                tokens, hidden = begun.token_ids + tokens, torch.cat([begun.hidden, hidden])
                self._begun[segment.row] = PartialForward(begun.start, tokens, hidden)
            else:
                self._begun[segment.row] = PartialForward(segment.start, tokens, hidden)
            at += segment.count
        return logits

    def logits(
        self, segments: list[Segment], ids: Sequence[int], wanted: Sequence[int], together: Sequence[PrefixGroup]
    ) -> torch.Tensor:
        """Return what Model.logits() does, without recomputing tokens that passed the first layers."""
        if not self._begun:
            return self._model.whole(segments, ids, wanted, together)
        known: list[torch.Tensor] = []
        rest: list[Segment] = []
        rest_ids: list[int] = []
        at = 0
        for segment in segments:
            mine = list(ids[at : at + segment.count])
            hidden = self._known(segment, mine)
            known.append(hidden)
            if len(hidden) < segment.count:
                start, count = segment.start + len(hidden), segment.count - len(hidden)
                rest.append(replace(segment, start=start, count=count))
                rest_ids += mine[len(hidden) :]
            at += segment.count
        if rest:
            with self._first():
                self._model.whole(rest, rest_ids, [])
            self._attends = self._model.cache.attended
            new = iter(torch.split(self._hidden[: len(rest_ids)], [segment.count for segment in rest]))
            known = [
                torch.cat([hidden, next(new)]) if len(hidden) < segment.count else hidden
                for hidden, segment in zip(known, segments, strict=True)
            ]
        with self._others(torch.cat(known)):
            return self._model.whole(segments, ids, wanted, together, attended=self._attends)

    def forget(self) -> None:
        """Drop the kept outputs."""
        self._begun = {}

    def _known(self, segment: Segment, ids: list[int]) -> torch.Tensor:
        """Return the first layers' output for a segment's leading tokens, (tokens, size), and drop it."""
        begun = self._begun.pop(segment.row, None)
        if begun is None or begun.start != segment.start:
            return self._hidden[:0]
        return begun.hidden[: shared(ids, begun.token_ids)]

    @contextmanager
    def _first(self) -> Iterator[None]:
        """Make the model end after its first layers."""

        def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._tuples = isinstance(output, tuple)
            self._hidden = (output[0] if self._tuples else output)[0]

        hook = self._list[self._layers - 1].register_forward_hook(keep)
        try:
            with self._passing(range(self._layers, len(self._list))):
                yield
        finally:
            hook.remove()

    @contextmanager
    def _others(self, hidden: torch.Tensor) -> Iterator[None]:
        """Make the model start after its first layers. hidden: (tokens, size), their output."""
        with self._passing(range(self._layers)) as passed:
            passed[0].given = hidden
            yield

    @contextmanager
    def _passing(self, layers: range) -> Iterator[list[PassThrough]]:
        """Replace these layers by ones that pass on their input."""
        own = [self._list[i] for i in layers]
        passed = [PassThrough(layer, self._tuples) for layer in own]
        try:
            for i, stand_in in zip(layers, passed, strict=True):
                self._list[i] = stand_in
            yield passed
        finally:
            for i, layer in zip(layers, own, strict=True):
                self._list[i] = layer

    def check(self) -> float:
        """Return how far logits are off for a split text, as a share of the largest."""
        model, rows = self._model, self._model.cache.rows
        ids, at = token_ids(model.inner, TEXT), TEXT - TRIED
        found = []
        for tried in (0, TRIED // 2, TRIED - 1):
            model.resize(2)
            self.forget()
            model.logits([Segment(0, 0, at, alone=True)], ids[:at], [0])
            for i in range(at, at + tried):
                self.guess([Segment(0, i, 1)], [ids[i]], [0])
            other = Segment(1, 0, 5, alone=True)
            found.append(model.logits([Segment(0, at, TRIED), other], ids[at:] + ids[:5], [*range(TRIED), TRIED + 4]))
        self.forget()
        model.resize(rows)
        return max(relative(each, found[0]) for each in found[1:])


class PassThrough(torch.nn.Module):
    """Stands in for a layer, and passes on its input, or `given` instead. (tokens, size)"""

    def __init__(self, layer: torch.nn.Module, tuples: bool) -> None:
        super().__init__()
        self.__dict__["stands_for"] = layer  # not a part of the model
        self.given: torch.Tensor | None = None
        self._tuples = tuples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.given is not None:
            padding = hidden.shape[1] - len(self.given)
            hidden = torch.cat([self.given, self.given[:1].expand(padding, -1)])[None] if padding else self.given[None]
        return (hidden,) if self._tuples else hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_for"], name)


def _list_of(model: Model) -> torch.nn.ModuleList:
    """Return the model's list of layers; an empty one if it has none."""
    layers = model.layers
    lists = (each for each in model.inner.modules() if isinstance(each, torch.nn.ModuleList))
    return next((each for each in lists if layers and list(each) == layers), torch.nn.ModuleList())


# -- proposer --------------------------------------------------------------------------------------
class EarlyExit(DraftModel):
    """Drafts with the model's first layers. width: the model's vocabulary size."""

    def __init__(self, model: Model, halves: LayerSplit, width: int, num_tokens: int | None, cost: Cost | None) -> None:
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

    def finish(self, row: RequestState) -> None:
        self._scripts.pop(row.place, None)

    def _left(self, row: RequestState) -> int:
        """Return for how many tokens the cache has room: the engine grows it, drafts do not."""
        return self._model.cache.slots - len(row.tokens)

    def _missing(self, row: RequestState) -> int:
        return 1

    def _script(self, row: RequestState) -> DraftView:
        script = self._scripts[row.place] = SameTokensView(row)
        self._held[row.place] = row.tokens[:-1]
        return script

    def _compute(self, segments: list[Segment], token_ids: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
        return self._halves.guess(segments, token_ids, wanted)
