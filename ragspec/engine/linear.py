"""Linear layers whose weights lie as oneDNN wants them: on a CPU, few tokens then cost half; many are a little faster
as they were, so a small model's weights are kept in both forms (docs/performance.md).

Limit: float32 on x86 CPUs with oneDNN. Weights that another module shares (tied embeddings) are kept beside the packed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear as plain_linear

from ragspec.host.machine import free_bytes

ROWS_HINT = 64
MANY = 64  # tokens from which on the plain form is faster
WIDEST = 8192  # outputs of a layer that many tokens go through; an output layer is asked for few
TOLERANCE = 1e-4  # of the largest output; what is beyond is no rounding
SHARE = 0.1  # of free memory that the second form may take


class PackedLinear(torch.nn.Module):
    """Computes what the Linear that it was made from computes.

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
        """(out_features, in_features), for code that asks a layer for it."""
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
    """Return whether this machine and this model's weights take packing."""
    weight = next(model.parameters())
    known = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return known and weight.device.type == "cpu" and weight.dtype == torch.float32


def pack_linears(model: torch.nn.Module) -> list[str]:
    """Replace every Linear of `model` in place; return the names of those that are left, as packed they differ."""
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
    """Return where weights lie that several modules have (tied embeddings)."""
    places = [parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False)]
    return {place for place in places if places.count(place) > 1} if len(places) != len(set(places)) else set()


@torch.inference_mode()
def _differs(packed: PackedLinear, linear: torch.nn.Linear) -> bool:
    """Return whether a packed layer computes something else, for one token, a few and many."""
    for tokens in (1, 17, MANY + 1):
        x = torch.linspace(-1, 1, tokens * linear.in_features).view(tokens, -1).sin()
        expected = linear(x)
        if not (packed(x) - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp_min(1e-6):
            return True
    return False
