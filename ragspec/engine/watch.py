"""Where the seconds of a model's forwards go, and how few they could be: for `ragspec benchmark --profile`.

    with Watch(model, bytes_per_s, flops_per_s) as watch: ...

A part's bound is what reading its weights, keys and values once, or multiplying by them, takes at the device's best
speeds, whichever is more (the roofline of Williams et al., 2009). Watching makes steps a little slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch

from ragspec.engine.forward import Model
from ragspec.engine.layout import Layout
from ragspec.engine.linear import PackedLinear
from ragspec.engine.native.program import Attention

LINEAR, ATTENTION = "linear layers", "attention"
PROMPTS, DECODING = "prompts", "decoding"
FLOAT = 4  # bytes


@dataclass(slots=True)
class Part:
    """A part of some forwards. bound_s: what it takes at the least; None where that is not known."""

    seconds: float = 0.0
    bound_s: float | None = 0.0

    def add(self, seconds: float, bound_s: float | None) -> None:
        self.seconds += seconds
        self.bound_s = None if bound_s is None or self.bound_s is None else self.bound_s + bound_s


@dataclass(slots=True)
class Phase:
    """Forwards of one kind: those that compute prompts, beside rows that decode or not, and those that do not."""

    steps: int = 0
    seconds: float = 0.0
    parts: dict[str, Part] = field(default_factory=lambda: {LINEAR: Part(), ATTENTION: Part()})

    def to_json(self) -> dict[str, Any]:
        """Return the phase; what is in no part are small operators."""
        rest = self.seconds - sum(part.seconds for part in self.parts.values())
        parts = {name: asdict(part) for name, part in self.parts.items()}
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "parts": parts | {"small operators": {"seconds": rest, "bound_s": None}},
        }


class Watch:
    """Watches a model's forwards while it is entered. bytes_per_s, flops_per_s: the device's best."""

    def __init__(self, model: Model, bytes_per_s: float, flops_per_s: float) -> None:
        self._model = model
        self._bytes_per_s = bytes_per_s
        self._flops_per_s = flops_per_s
        self._phases = {PROMPTS: Phase(), DECODING: Phase()}
        self._phase = self._phases[DECODING]
        self._started = 0.0
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._model.watch = self
        for module in self._model.inner.modules():
            if isinstance(module, PackedLinear | torch.nn.Linear):
                self._hooks.append(module.register_forward_pre_hook(self._begin))
                self._hooks.append(module.register_forward_hook(self._end))
        return self

    def __exit__(self, *exc: object) -> None:
        self._model.watch = None
        for hook in self._hooks:
            hook.remove()

    def to_json(self) -> dict[str, Any]:
        """Return {phase: {steps, seconds, parts: {name: {seconds, bound_s}}}}."""
        return {name: phase.to_json() for name, phase in self._phases.items()}

    @contextmanager
    def forward(self, layout: Layout) -> Iterator[None]:
        """Take what happens as one forward of `layout`."""
        self._phase = self._phases[PROMPTS if any(segment.alone for segment in layout.segments) else DECODING]
        started = self._now()
        yield
        self._phase.steps += 1
        self._phase.seconds += self._now() - started

    def attend(self, layout: Layout, query: torch.Tensor, slot: int, do: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Do a layer's attention of queries (1, heads, T, head_dim). slot: bytes of a token's keys and values.

        The bound is that of the plain causal mask; windows that show less can be faster.
        """
        started = self._now()
        result = do()
        self._attended(layout, self._now() - started, query.shape[1] * query.shape[3], slot)
        return result

    def layer(self, layout: Layout, shape: Sequence[Any], seconds: Sequence[float]) -> None:
        """Take in a layer that was one call. shape: as in program.py; seconds: that each of these took."""
        for part, taken in zip(shape, seconds, strict=True):
            if isinstance(part, Attention):
                self._attended(layout, taken, part.heads * part.size, 2 * part.kv_heads * part.size * FLOAT)
            else:
                bound = sum(self._bound(size, 2 * n * k * layout.tokens) for k, n, size in part)
                self._phase.parts[LINEAR].add(taken, bound)

    def _attended(self, layout: Layout, seconds: float, width: int, slot: int) -> None:
        """Take in a layer's attention. width: numbers of a query. slot: bytes of a token's keys and values."""
        pairs = sum(s.count * s.start + s.count * (s.count + 1) // 2 for s in layout.segments)
        self._phase.parts[ATTENTION].add(seconds, self._bound(layout.distinct_slots * slot, 4 * width * pairs))

    def _begin(self, module: Any, inputs: tuple[Any, ...]) -> None:
        self._started = self._now()

    def _end(self, module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        seconds = self._now() - self._started
        weights = module.in_features * module.out_features
        tokens = inputs[0].numel() // module.in_features
        packed = getattr(module, "native", None)
        size = inputs[0].element_size() if packed is None else packed.element_size()
        self._phase.parts[LINEAR].add(seconds, self._bound(weights * size, 2 * weights * tokens))

    def _bound(self, size: int, flops: int) -> float:
        return max(size / self._bytes_per_s, flops / self._flops_per_s)

    def _now(self) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()
