"""Linear layers whose weights have the form, or forms, that this machine is fastest with (forms.py).

A second form is kept where that takes little of the free memory: decoding and prompts often want different ones.
Limit: float32 on CPUs. Weights that another module shares (tied embeddings) are kept beside the others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from ragspec.engine.forms import Disturbed, Form, Native, Shape, best, estimated, makers, measured
from ragspec.engine.native.kernels import Kernels
from ragspec.engine.operators import CAPTURING
from ragspec.host.machine import free_bytes

log = logging.getLogger(__name__)
TRIED = (1, 17, 65)  # tokens that a layer's forms are compared with
MANY = 200  # also those of the first layer of each shape: kernels compute so many in another way
TOLERANCE = 1e-4  # of the largest output; more is not rounding
SHARE = 0.1  # of free memory that further forms may take


class PackedLinear(torch.nn.Module):
    """Computes what the Linear it was made from computes.

    forms: its weight, by the form's name. choice: the name for 0, 1, 2, ... tokens. shared: its weight, where another
    module has it as well.
    """

    def __init__(
        self, linear: torch.nn.Linear, forms: Mapping[str, Form], choice: Sequence[str], shared: Any = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._forms = dict(forms)
        self._choice = choice
        self._shared = [shared]  # in a list: it is the other module's parameter

    @property
    def weight(self) -> torch.Tensor:
        """(out_features, in_features), for code that reads a layer's weight."""
        return self.unpacked().weight

    @property
    def native(self) -> torch.Tensor | None:
        """Its weight as our own kernels read it, where it has that form."""
        form = self._forms.get("native")
        return form.packed if isinstance(form, Native) else None

    def unpacked(self) -> torch.nn.Linear:
        """Return the Linear that it was made from."""
        linear = torch.nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        (shared,) = self._shared
        if shared is None:
            form = self._forms.get("torch") or next(iter(self._forms.values()))
            shared = torch.nn.Parameter(form.dense(), requires_grad=False)
        linear.weight, linear.bias = shared, self.bias
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., in_features). Returns (..., out_features)."""
        parts = CAPTURING.get()
        if parts is not None:
            return parts.linear(x, self, self.out_features)
        return self._forms[self._choice[min(x.shape[-2], len(self._choice) - 1)]](x, self.bias)


def can_pack(model: torch.nn.Module) -> bool:
    """Return whether this machine may have better forms of this model's weights."""
    weight = next(model.parameters())
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def pack_linears(model: torch.nn.Module, kernels: Kernels | None = None) -> list[str]:
    """Replace every Linear of `model` in place; return the names of those left, because packed they differ.

    kernels: our own, where they are built. Each weight is freed as it is replaced, unless something else holds it.
    """
    found = [
        (module, name, f"{path}.{name}")
        for path, module in model.named_modules()
        for name, child in module.named_children()
        # a subclass may compute something else, and some experts are of size 0
        if type(child) is torch.nn.Linear and can_pack(child) and child.weight.numel()
    ]
    makes = makers(kernels)
    if len(makes) == 1 or not found:
        return []
    choices = chosen_forms([getattr(module, name) for module, name, _ in found], kernels)
    shared = _shared(model)
    left = []
    known: set[Shape] = set()
    for module, name, path in found:
        child = getattr(module, name)
        shape = child.out_features, child.in_features
        weight, choice = child.weight.detach(), choices[shape]
        forms = {each: makes[each](weight) for each in dict.fromkeys(choice)}
        packed = PackedLinear(child, forms, choice, child.weight if child.weight.data_ptr() in shared else None)
        if packed_differs(forms, child, TRIED if shape in known else (*TRIED, MANY)):
            left.append(path)
        else:
            setattr(module, name, packed)
        known.add(shape)
    return left


def chosen_forms(linears: Sequence[torch.nn.Linear], kernels: Kernels | None) -> dict[Shape, tuple[str, ...]]:
    """Return which form serves how many tokens, for each shape."""
    weights = [linear.weight.detach() for linear in linears]
    try:
        seconds = measured(weights, kernels)
    except Disturbed:
        log.info("the machine is busy: linear layers are timed with one thread, and the result is not kept")
        seconds = estimated(weights, makers(kernels))
    if not seconds:
        return {(linear.out_features, linear.in_features): ("torch",) for linear in linears}
    largest = max(seconds, key=prod)
    for weight in weights:  # what is too large to be tried is like the largest that was
        seconds.setdefault((weight.shape[0], weight.shape[1]), seconds[largest])
    several = {shape: best(found, several=True) for shape, found in seconds.items()}
    further = sum((len(set(several[w.shape[0], w.shape[1]])) - 1) * w.nbytes for w in weights)
    if further <= SHARE * free_bytes():
        return several
    return {shape: best(found, several=False) for shape, found in seconds.items()}


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
def packed_differs(forms: Mapping[str, Form], linear: torch.nn.Linear, tried: Sequence[int]) -> bool:
    """Return whether one of a layer's forms computes something else. tried: numbers of tokens."""
    for tokens in tried:
        x = torch.linspace(-1, 1, tokens * linear.in_features).view(tokens, -1).sin()
        expected = linear(x)
        for form in forms.values():
            if not (form(x, linear.bias) - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp_min(1e-6):
                return True
    return False
