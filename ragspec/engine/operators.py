"""What a captured layer (capture.py) calls as one operator each: attention over the cache, and packed linear layers.

An operator takes tensors and numbers only. What else a call needs is in the Parts of the layer, by number: those that
are being gathered during a capture, those of the layer under way at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import library

CAPTURING: ContextVar[Parts | None] = ContextVar("CAPTURING", default=None)  # the parts that a capture gathers
RUNNING: ContextVar[Parts] = ContextVar("RUNNING")  # those of the layer that runs


class Attend(Protocol):
    """A layer's attention (attention.py)."""

    @property
    def scaling(self) -> float | None: ...

    @property
    def cap(self) -> float | None: ...

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, rule: Any
    ) -> torch.Tensor: ...


@dataclass(slots=True)
class Parts:
    """What the operators of one layer stand for, by number. mask: that of the layer's present call."""

    attends: list[Attend] = field(default_factory=list)
    linears: list[torch.nn.Module] = field(default_factory=list)
    mask: Any = None

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Let the calls of a layer leave their parts here, and operators in the graph."""
        token = CAPTURING.set(self)
        try:
            yield
        finally:
            CAPTURING.reset(token)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any, do: Attend) -> Any:
        """Put a call of `do` into the graph that is captured."""
        self.attends.append(do)
        return torch.ops.ragspec.attend(query, key, value, sinks, len(self.attends) - 1)

    def linear(self, x: torch.Tensor, layer: torch.nn.Module, size: int) -> torch.Tensor:
        """Put a call of `layer`, which returns `size` features, into the graph that is captured."""
        self.linears.append(layer)
        result: torch.Tensor = torch.ops.ragspec.linear(x, len(self.linears) - 1, size)
        return result


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, number: int
) -> torch.Tensor:
    parts = RUNNING.get()
    return parts.attends[number](query, key, value, sinks, parts.mask)


def _attend_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, number: int
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _linear(x: torch.Tensor, number: int, size: int) -> torch.Tensor:
    result: torch.Tensor = RUNNING.get().linears[number](x)
    return result


def _linear_shape(x: torch.Tensor, number: int, size: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], size)


_library: Any = library.Library("ragspec", "DEF")  # type: ignore[no-untyped-call]
for _name, _arguments, _does, _shape in (
    ("attend", "Tensor query, Tensor key, Tensor value, Tensor? sinks, int number", _attend, _attend_shape),
    ("linear", "Tensor x, int number, int size", _linear, _linear_shape),
):
    _library.define(f"{_name}({_arguments}) -> Tensor")
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _does, _key)
    library.register_fake(f"ragspec::{_name}", _shape, lib=_library)
