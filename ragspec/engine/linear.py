"""Linear layers whose weights lie as oneDNN wants them: on a CPU, few tokens then cost half; many are a little faster
as they were, so a small model's weights are kept in both forms (docs/performance.md).

Limit: float32 on x86 CPUs with oneDNN. Weights that another module shares (tied embeddings) are kept beside the packed.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as plain_linear

from ragspec.machine import free_bytes

ROWS_HINT = 64
MANY = 64  # tokens from which on the plain form is faster
WIDEST = 8192  # outputs of a layer that many tokens go through; an output layer is asked for few
SHARE = 0.1  # of free memory that the second form may take


class PackedLinear(torch.nn.Module):
    """Computes what the Linear that it was made from computes. both: keep the plain form too."""

    def __init__(self, linear: torch.nn.Linear, both: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        self.plain = weight if both and self.out_features <= WIDEST else None

    def unpacked(self) -> torch.nn.Linear:
        """Return the Linear that it was made from."""
        weight = self.packed.to_dense() if self.plain is None else self.plain
        linear = torch.nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        linear.bias = self.bias
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., in_features). Returns (..., out_features)."""
        if self.plain is not None and x.shape[-2] >= MANY:
            return plain_linear(x, self.plain, self.bias)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return result


def can_pack(model: torch.nn.Module) -> bool:
    """Return whether this machine and this model's weights take packing."""
    weight = next(model.parameters())
    known = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return known and weight.device.type == "cpu" and weight.dtype == torch.float32


def unpack_linears(model: torch.nn.Module) -> None:
    """Undo pack_linears. Weights that were shared with another module no longer are."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, PackedLinear):
                setattr(module, name, child.unpacked())


def pack_linears(model: torch.nn.Module) -> int:
    """Replace every Linear of `model` in place; return how many."""
    found = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is torch.nn.Linear  # a subclass may compute something else
    ]
    both = sum(child.weight.nbytes for _, _, child in found) <= SHARE * free_bytes()
    for module, name, child in found:
        setattr(module, name, PackedLinear(child, both))
    return len(found)
