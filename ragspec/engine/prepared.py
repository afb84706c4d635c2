"""A loaded model made ready for the engine: packed weights, kernels, halves, and the self-check."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ragspec.engine.forward import Model
from ragspec.engine.halves import Halves
from ragspec.engine.heap import keep_freed_memory
from ragspec.engine.linear import can_pack, pack_linears, unpack_linears
from ragspec.engine.masks import Unsupported
from ragspec.engine.native.kernels import Kernels, Unbuilt, build
from ragspec.engine.native.worth import attends_right, worth_having
from ragspec.engine.obstacle import keeps_state, obstacle
from ragspec.engine.selfcheck import differs
from ragspec.errors import flat
from ragspec.models.rounding import tolerance

log = logging.getLogger(__name__)


class Refused(Exception):
    """The engine cannot run this model; the message says why. The model is as it was."""


def prepare(inner: Any, notes: list[str] | None = None, native: bool = True) -> Model:
    """Return the model ready for packed rows, checked to compute what it computes in transformers.

    Raises Refused, the model left as it was. notes: what the run should say of it goes there. native: with kernels of
    our own.
    """
    if keeps_state(inner):
        raise Refused(f"it {obstacle(inner)}")
    kernels, packs = None, can_pack(inner)
    if packs:
        keep_freed_memory()
        kernels = _kernels(inner, notes) if native else None
    left: list[str] = []
    model, why, attention = None, "", inner.config._attn_implementation
    try:
        if packs:
            left = pack_linears(inner, kernels)
        model = Model(inner, 2, kernels if kernels is None or _attends_well(kernels, notes) else None)
        why = differs(model, tolerance(inner.dtype))
    except Unsupported as reason:
        why = str(reason)
    except Exception as error:  # whatever a model's code raises here is no reason to fail the run
        log.debug("the model does not run on the engine", exc_info=error)
        why = f"does not take packed rows ({type(error).__name__}: {flat(error, 120)})"
    if why or model is None:
        if model is not None:
            model.release()
        elif inner.config._attn_implementation != attention:
            inner.set_attn_implementation(attention)
        unpack_linears(inner)
        raise Refused(f"it {obstacle(inner) or why}")
    if left and notes is not None:
        notes.append(f"{len(left)} linear layers are not packed: that would change what they compute ({left[0]})")
    return model


def halves_of(model: Model, layers: int) -> Halves:
    """Return the model's halves, checked to compute what the whole does. Raises Refused, the model left whole."""
    halves = Halves(model, layers)
    try:
        off = halves.check()
        why = "" if off <= tolerance(model.inner.dtype) else f"computes different logits in halves (off by {off:.1e})"
    except (RuntimeError, TypeError, AttributeError, IndexError, KeyError) as error:
        log.debug("the model does not run in halves", exc_info=error)
        why = f"does not run in halves ({type(error).__name__}: {flat(error, 120)})"
    if why:
        model.halves = None
        raise Refused(f"it {why}")
    return halves


def _kernels(inner: Any, notes: list[str] | None) -> Kernels | None:
    """Return our own kernels for the model, None where they cannot be built."""
    config = inner.config.get_text_config()
    own, names = config.to_dict(), config.attribute_map
    sizes = [own.get(names.get(name, name)) for name in ("head_dim", "hidden_size", "num_attention_heads")]
    head, hidden, heads = (size if isinstance(size, int) else 0 for size in sizes)
    try:
        return build(head or (hidden // heads if heads else 0))
    except Unbuilt as reason:
        if notes is not None:
            notes.append(f"kernels: torch's own are used, which are slower, because {reason}")
        return None


def _attends_well(kernels: Kernels, notes: list[str] | None) -> bool:
    """Return whether attention is left to our own kernels; say so where it is not."""
    if not attends_right(kernels):
        why = "as what the C++ compiler made of ours computes something else"
    elif not worth_having(kernels):
        why = "which is faster here than what the C++ compiler made of ours"
    else:
        return True
    if notes is not None:
        notes.append(f"kernels: attention is torch's own, {why}")
    return False


def linear_weights(inner: Any) -> tuple[int, int]:
    """Return how many weights a token is multiplied by, and their bytes."""
    weights = [module.weight for module in inner.modules() if isinstance(module, torch.nn.Linear)]
    return sum(weight.numel() for weight in weights), sum(weight.nbytes for weight in weights)
