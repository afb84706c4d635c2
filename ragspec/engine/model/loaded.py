"""Make a loaded model ready for the engine: packed weights, kernels, layer split, self-check; or say why not."""

from __future__ import annotations

import ctypes
import inspect
import logging
import platform
import sys
from contextlib import suppress
from typing import Any, Literal

import torch

from ragspec.engine.backends.graphs import Capture, CudaGraphs, emulated
from ragspec.engine.backends.paged_attention import Compute, flex
from ragspec.engine.model.compiled import INDUCTOR, check_folder
from ragspec.engine.model.devices import is_offloaded, spread
from ragspec.engine.model.forward import Model
from ragspec.engine.model.masks import Unsupported
from ragspec.engine.model.merged_linears import MergedLinears
from ragspec.engine.model.self_check import attention_is_exact, differs, kernels_are_faster
from ragspec.engine.model.weight_layouts import can_pack, pack_linears, stored_bytes, unpack_linears
from ragspec.engine.native.kernels import Kernels, build
from ragspec.engine.proposers.early_exit import LayerSplit
from ragspec.errors import flat
from ragspec.host.compiler import Unbuilt
from ragspec.models.compat import tolerance


def incompatibility(model: Any) -> str:
    """Return why the model cannot run in packed rows, judged by its declarations, or "".

    The text completes a sentence that starts with "it".
    """
    if keeps_state(model):
        return "keeps a recurrent state, which cannot undo a rejected draft"
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(sys.modules[type(model).__module__]):
        return "has its own attention, which cannot be replaced"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "assigns its own token positions"
    return ""


def keeps_state(model: Any) -> bool:
    """Return whether a layer keeps a recurrent state instead of keys and values, by its declaration or its cache."""
    from transformers import DynamicCache

    if model._is_stateful:
        return True
    config = model.config.get_text_config(decoder=True)
    return hasattr(config, "num_hidden_layers") and any(DynamicCache(config=config).is_linear)


# -- malloc ----------------------------------------------------------------------------------------
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # constants of mallopt(3)
KEEP = 1 << 30  # bytes
LARGEST = 1 << 25  # bytes; the most that mallopt accepts for MMAP_THRESHOLD


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory; do nothing for another C library.

    Every step allocates and frees tensors of megabytes, and memory returned to the system has to be paged in again
    (docs/lab/performance.md).
    """
    if platform.libc_ver()[0] == "glibc":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(TRIM_THRESHOLD, KEEP)
            libc.mallopt(MMAP_THRESHOLD, LARGEST)


# -- preparation -----------------------------------------------------------------------------------


WITH_BFLOAT16 = 8, 0  # least compute capability
log = logging.getLogger(__name__)


class Refused(Exception):
    """The engine cannot run this model; the message says why. The model is left unchanged."""


AttentionWish = Literal["auto", "cpu", "sdpa", "flex"]
GraphsWish = Literal["auto", "on", "off", "emulate"]


def prepare(
    inner: Any,
    notes: list[str] | None = None,
    native: bool = True,
    attention: AttentionWish = "auto",
    graphs: GraphsWish = "auto",
    exact: bool = False,
) -> Model:
    """Return the model for packed rows, checked to compute what it computes in transformers.

    Args:
        inner: The loaded model.
        notes: Receives notes for the user.
        native: Whether to use our own kernels.
        attention: What computes attention. FlexAttention, over a cache in blocks, is for GPUs; a model that it does not
            compute exactly gets torch's own attention, with a note. A model over several GPUs needs it.
        graphs: Whether steps over that cache are captured; those of a model over several GPUs are not.
        exact: Whether those steps all have one shape, so that answers are the same bit for bit.

    Raises:
        Refused: If the check fails; the model is left unchanged.
    """
    refuse_offloaded(inner)
    notes = [] if notes is None else notes
    cuda, over = inner.device.type == "cuda", spread(inner)
    if attention == "cpu" and inner.device.type != "cpu":
        notes.append(f"attention: cpu has no effect on {inner.device.type}")
    if not (attention == "flex" or (attention != "sdpa" and cuda)):
        if over:
            raise Refused(f"it is {over}, which only attention: flex can compute")
        if exact:
            notes.append("exact: only has an effect with attention: flex")
        return _prepared(inner, notes, native, attention != "sdpa")
    if graphs == "on" and not cuda:
        notes.append(f"graphs: on has no effect on {inner.device.type}")
    if cuda:
        torch.cuda.set_device(inner.device)  # for streams, events and graphs
        check_folder(INDUCTOR, notes)
    if over and cuda and graphs in ("auto", "on"):
        notes.append(f"graphs: the model is {over}, so its steps run without CUDA graphs, which is slower")
        graphs = "off"
    capture = emulated if graphs == "emulate" else CudaGraphs() if cuda and graphs != "off" else None
    merged = MergedLinears(inner) if cuda and not over else None  # accelerate's hooks are on each layer
    try:
        _check_dtype(inner)
        compute = flex(cuda, notes, exact)
        try:
            return _prepared(inner, notes, native, False, compute, capture, exact)
        except Refused:
            if not merged:
                raise
            merged.undo()  # the products may be what differs
            return _prepared(inner, notes, native, False, compute, capture, exact)
    except (Refused, Unsupported) as reason:
        if merged:
            merged.undo()
        why = f"it {reason}" if isinstance(reason, Unsupported) else reason
        if over:
            raise Refused(f"it is {over}, which FlexAttention alone can compute, and {why}") from reason
        model = _prepared(inner, notes, native, True)
        notes.append(f"attention: FlexAttention, which is faster on a GPU, is not used: {why}")
        if exact:
            notes.append("exact: has no effect without FlexAttention: answers may differ where two tokens nearly tie")
        return model


def _check_dtype(inner: Any) -> None:
    """Raise Unsupported for numbers that Triton does not compile FlexAttention for on this device."""
    if inner.device.type != "cuda" or inner.dtype != torch.bfloat16 or torch.version.hip is not None:
        return
    if torch.cuda.get_device_capability(inner.device) < WITH_BFLOAT16:
        raise Unsupported("is in bfloat16, which this GPU is too old for; runner_args.dtype: float16 is faster here")


def refuse_offloaded(inner: Any) -> None:
    """Raise Refused for a model with weights that are on no device between forwards."""
    if is_offloaded(inner):
        raise Refused("it does not fit in the GPUs' memory: weights are brought there for each forward")


def _prepared(
    inner: Any,
    notes: list[str],
    native: bool,
    own_attention: bool,
    paged: Compute | None = None,
    capture: Capture | None = None,
    exact: bool = False,
) -> Model:
    """Return the model with one kind of attention. own_attention: our kernels', if native. Raises Refused."""
    if keeps_state(inner):
        raise Refused(f"it {incompatibility(inner)}")
    kernels, packs = None, can_pack(inner)
    if packs:
        keep_freed_memory()
        kernels = _kernels(inner, notes) if native else None
    left: list[str] = []
    model, why, attention = None, "", inner.config._attn_implementation
    try:
        if packs:
            left = pack_linears(inner, kernels)
        attends = kernels is not None and own_attention and _attends_well(kernels, notes)
        model = Model(inner, 2, kernels if attends else None, paged, capture, exact)
        if model.steps is not None:
            model.steps.notes = notes
            model.steps.cascade = "auto" if inner.device.type == "cuda" else "off"
        why = differs(model, tolerance(inner.dtype))
    except Unsupported as reason:
        why = str(reason)
    except Exception as error:  # whatever the model's code raises here, transformers may still run it
        log.debug("the model does not run on the engine", exc_info=error)
        why = f"does not take packed rows ({type(error).__name__}: {flat(error, 120)})"
    if why or model is None:
        if model is not None:
            model.release()
        elif inner.config._attn_implementation != attention:
            inner.set_attn_implementation(attention)
        unpack_linears(inner)
        raise Refused(f"it {incompatibility(inner) or why}")
    if left:
        notes.append(
            f"{len(left)} linear layers are not packed, because packing would change their results ({left[0]})"
        )
    return model


def halves_of(model: Model, layers: int) -> LayerSplit:
    """Return the model split after `layers` layers, checked against the whole. Raises Refused, the model unsplit."""
    halves = LayerSplit(model, layers)
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


def _kernels(inner: Any, notes: list[str]) -> Kernels | None:
    """Return our own kernels for the model, None if they cannot be built."""
    config = inner.config.get_text_config()
    own, names = config.to_dict(), config.attribute_map
    sizes = [own.get(names.get(name, name)) for name in ("head_dim", "hidden_size", "num_attention_heads")]
    head, hidden, heads = (size if isinstance(size, int) else 0 for size in sizes)
    try:
        return build(head or (hidden // heads if heads else 0))
    except Unbuilt as reason:
        notes.append(f"kernels: using torch's slower kernels, because {reason}")
        return None


def _attends_well(kernels: Kernels, notes: list[str]) -> bool:
    """Return whether our kernels' attention is exact and fast enough; otherwise add a note."""
    if not attention_is_exact(kernels):
        why = "because our compiled kernels give different results"
    elif not kernels_are_faster(kernels):
        why = "which is faster here than our compiled kernels"
    else:
        return True
    notes.append(f"kernels: attention is torch's own, {why}")
    return False


def linear_weights(inner: Any) -> tuple[int, int]:
    """Return the number of weights of linear layers, by which each token is multiplied, and their bytes."""
    weights = [module.weight for module in inner.modules() if isinstance(module, torch.nn.Linear)]
    return sum(weight.numel() for weight in weights), sum(map(stored_bytes, weights))
