"""Linear layers that read the same input (queries, keys and values; gate and up) are computed as one product.

On a GPU, several small products take longer than a large one of the same weights. Which layers read the same input
shows in a forward. Limit: layers of one dtype that are plain torch.nn.Linear, within one parent module.

    >>> merged = MergedLinears(model); len(merged), merged.undo()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from ragspec.engine.model.weight_layouts import is_plain


class Product:
    """The common product. weight: (n, k) of all parts, one after the other."""

    def __init__(self, linears: Sequence[torch.nn.Linear]) -> None:
        with torch.no_grad():
            self.weight = torch.nn.Parameter(torch.cat([*(each.weight for each in linears)]), requires_grad=False)
            self.bias = None
            if any(each.bias is not None for each in linears):
                biases: list[torch.Tensor] = [
                    torch.zeros_like(each.weight[:, 0]) if each.bias is None else each.bias for each in linears
                ]
                self.bias = torch.nn.Parameter(torch.cat(biases), requires_grad=False)
        self.input: torch.Tensor | None = None
        self.output: torch.Tensor | None = None


class MergedLinear(torch.nn.Module):
    """One of the layers: the first to be called computes the product, and the last one lets go of it."""

    def __init__(self, original: torch.nn.Linear, product: Product, start: int, first: bool, last: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = original.in_features, original.out_features
        self.rows = slice(start, start + original.out_features)
        self._last = last
        self._product = [product]  # in a list: its parameters are the first layer's
        if first:
            self.merged_weight, self.merged_bias = product.weight, product.bias
        self._leader: list[MergedLinear] = [self]

    def follow(self, leader: MergedLinear) -> None:
        """Use the parameters of `leader`."""
        self._leader = [leader]

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own weight, a part of the common one."""
        weight: torch.Tensor = self._leader[0].merged_weight[self.rows]
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The layer's own bias."""
        bias = self._leader[0].merged_bias
        return None if bias is None else bias[self.rows]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., out_features) for x of (..., in_features)."""
        product, leader = self._product[0], self._leader[0]
        if product.input is not x or product.output is None:
            product.input, product.output = x, linear(x, leader.merged_weight, leader.merged_bias)
        mine = product.output[..., self.rows]
        if self._last:
            product.input = product.output = None
        return mine


class MergedLinears:
    """A model's linear layers, merged where they read the same input."""

    def __init__(self, inner: torch.nn.Module) -> None:
        self._originals: list[tuple[torch.nn.Module, str, torch.nn.Linear]] = []
        for group in _alike(inner):
            self._merge(group)

    def __len__(self) -> int:
        return len(self._originals)

    def _merge(self, group: Sequence[tuple[torch.nn.Module, str, torch.nn.Linear]]) -> None:
        linears = [original for _, _, original in group]
        product, start = Product(linears), 0
        leader: MergedLinear | None = None
        for number, (parent, name, original) in enumerate(group):
            part = MergedLinear(original, product, start, number == 0, number == len(group) - 1)
            leader = leader or part
            part.follow(leader)
            setattr(parent, name, part)
            self._originals.append((parent, name, original))
            # the same numbers, so that undo() finds them: no memory is taken twice
            original.weight = torch.nn.Parameter(product.weight[part.rows], requires_grad=False)
            start += original.out_features

    def undo(self) -> None:
        """Restore the layers."""
        for parent, name, original in self._originals:
            setattr(parent, name, original)
        self._originals.clear()


def _alike(inner: Any) -> list[list[tuple[torch.nn.Module, str, torch.nn.Linear]]]:
    """Return linear layers of one parent that read the same tensor, in the order of their calls."""
    owners = {
        child: (parent, name)
        for parent in inner.modules()
        for name, child in parent.named_children()
        if is_plain(child)
    }
    calls: list[tuple[torch.nn.Linear, torch.Tensor]] = []  # inputs are kept, so that no two have the same identity
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: calls.append((module, inputs[0]))) for module in owners
    ]
    try:
        with torch.inference_mode():
            inner(torch.tensor([[1, 2, 3]], device=inner.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    times = [module for module, _ in calls]
    groups: dict[tuple[int, int, torch.dtype], list[tuple[torch.nn.Module, str, torch.nn.Linear]]] = {}
    for module, given in calls:
        if times.count(module) == 1 and "forward" not in vars(module):
            parent, name = owners[module]
            groups.setdefault((id(parent), id(given), module.weight.dtype), []).append((parent, name, module))
    return [group for group in groups.values() if len(group) > 1]
