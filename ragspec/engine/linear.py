"""Linear layers with weights in oneDNN's own layout: on a CPU, a few tokens then cost half as much. Many tokens are a
little faster in the plain layout, so a small model's weights are kept in both (docs/performance.md).

Limit: float32 on x86 CPUs with oneDNN. Weights that another module shares (tied embeddings) are kept beside the packed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn.functional import linear as plain_linear

from ragspec.host.machine import free_bytes

ROWS_HINT = 64
MANY = 64  # tokens from which on the plain form is faster
WIDEST = 8192  # outputs; a wider layer is the output layer, which few tokens go through
TOLERANCE = 1e-4  # of the largest output; more is not rounding
SHARE = 0.1  # of free memory that the second form may take


class PackedLinear(torch.nn.Module):
    """Computes what the Linear it was made from computes.

    both: keep the plain form too. shared: its weight, where another module has it as well.
    """

    def __init__(self, linear: torch.nn.Linear, both: bool = False, shared: Any = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        self.plain = weight if both and self.out_features <= WIDEST else None
        self._shared = [shared]  # in a list: it is the other module's parameter

    @property
    def weight(self) -> torch.Tensor:
        """(out_features, in_features), for code that reads a layer's weight."""
        return self.unpacked().weight

    def unpacked(self) -> torch.nn.Linear:
        """Return the Linear that it was made from."""
        weight = self.packed.to_dense() if self.plain is None else self.plain
        linear = torch.nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        (shared,) = self._shared
        linear.weight = torch.nn.Parameter(weight, requires_grad=False) if shared is None else shared
        linear.bias = self.bias
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., in_features). Returns (..., out_features)."""
        if self.plain is not None and x.shape[-2] >= MANY:
            return plain_linear(x, self.plain, self.bias)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return result


def can_pack(model: torch.nn.Module) -> bool:
    """Return whether this machine can pack this model's weights."""
    weight = next(model.parameters())
    known = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return known and weight.device.type == "cpu" and weight.dtype == torch.float32


def pack_linears(model: torch.nn.Module) -> list[str]:
    """Replace every Linear of `model` in place; return the names of those left plain, because packed they differ."""
    found = [
        (module, name, child, f"{path}.{name}")
        for path, module in model.named_modules()
        for name, child in module.named_children()
        if type(child) is torch.nn.Linear  # a subclass may compute something else
    ]
    both = sum(child.weight.nbytes for _, _, child, _ in found) <= SHARE * free_bytes()
    shared = _shared(model)
    left = []
    for module, name, child, path in found:
        packed = PackedLinear(child, both, child.weight if child.weight.data_ptr() in shared else None)
        if _differs(packed, child):
            left.append(path)
        else:
            setattr(module, name, packed)
    return left


def unpack_linears(model: torch.nn.Module) -> None:
    """Undo pack_linears."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, PackedLinear):
                setattr(module, name, child.unpacked())


def _shared(model: torch.nn.Module) -> set[int]:
    """Return the addresses of weights that several modules have (tied embeddings)."""
    addresses = [parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False)]
    return {address for address, count in Counter(addresses).items() if count > 1}


@torch.inference_mode()
def _differs(packed: PackedLinear, linear: torch.nn.Linear) -> bool:
    """Return whether a packed layer computes something else, tried with one token, a few and many."""
    for tokens in (1, 17, MANY + 1):
        x = torch.linspace(-1, 1, tokens * linear.in_features).view(tokens, -1).sin()
        expected = linear(x)
        if not (packed(x) - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp_min(1e-6):
            return True
    return False
