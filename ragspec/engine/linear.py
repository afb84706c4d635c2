"""Linear layers whose weights lie as oneDNN wants them: on a CPU, few rows then cost half (docs/performance.md).

Limit: float32 on x86 CPUs with oneDNN. The original weight is freed, so packing needs no memory but while it goes on;
weights that another module shares (tied embeddings) are kept beside the packed ones.
"""

from __future__ import annotations

import torch

ROWS_HINT = 64


class PackedLinear(torch.nn.Module):
    """Computes what the Linear that it was made from computes."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., in_features). Returns (..., out_features)."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return result


def can_pack(model: torch.nn.Module) -> bool:
    """Return whether this machine and this model's weights take packing."""
    weight = next(model.parameters())
    known = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return known and weight.device.type == "cpu" and weight.dtype == torch.float32


def pack_linears(model: torch.nn.Module) -> int:
    """Replace every Linear of `model` in place; return how many."""
    found = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is torch.nn.Linear  # a subclass may compute something else
    ]
    for module, name, child in found:
        setattr(module, name, PackedLinear(child))
    return len(found)
