"""Rotary embeddings whose frequencies depend on how long the text is: dynamic NTK and LongRoPE.

transformers takes the frequencies of a forward from its largest position, and its modules remember the longest text
they have seen. Source: transformers 5.19 to 5.24, modeling_rope_utils.dynamic_rope_update.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ragspec.models.forwards import cache_word

LENGTH_DEPENDENT = ("dynamic", "longrope")


def length_dependent(model: Any) -> list[Any]:
    """Return the modules of a model whose rotary frequencies depend on the length of the text."""
    return [module for module in model.modules() if hasattr(module, "rope_type") and kind_of(module)]


def kind_of(module: Any) -> str:
    """Return the type of a rotary module's frequencies if they depend on the length, else ""."""
    types = module.rope_type.values() if isinstance(module.rope_type, dict) else [module.rope_type]
    return next((kind for kind in LENGTH_DEPENDENT if any(kind in own for own in types if own)), "")


def limit_of(module: Any) -> int:
    """Return the length beyond which the frequencies of a rotary module change."""
    if kind_of(module) == "dynamic":
        return int(module.config.max_position_embeddings)
    parameters = module.config.rope_parameters
    if "original_max_position_embeddings" not in parameters:  # by kind of layer
        parameters = next(own for own in parameters.values() if own.get("rope_type") == "longrope")
    return int(parameters["original_max_position_embeddings"])


def kinds_of(modules: Iterable[Any]) -> list[tuple[str, int]]:
    """Return the types among rotary modules, each with the length beyond which its frequencies change."""
    return sorted({(kind_of(module), limit_of(module)) for module in modules})


def effective_length(length: int, kind: str, limit: int) -> int:
    """Return the shortest length that has the frequencies of `length`."""
    return max(length, limit) if kind == "dynamic" else limit + (length > limit)


def forget(module: Any) -> None:
    """Make a rotary module forget the texts it has seen: what it keeps would be the next record's frequencies."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            setattr(module, name.replace("original_inv_freq", "inv_freq"), buffer.clone())  # it is written to
    for name in list(vars(module)):
        if name.endswith("max_seq_len_cached"):
            setattr(module, name, module.original_max_seq_len)


def restart_length(model: Any) -> int | None:
    """Return the length beyond which generate() recomputes the whole text, None if it never does.

    Phi-3 and its relatives do when an answer outgrows the short frequencies; the model's own code says so.
    """
    import torch

    for kind, limit in kinds_of(length_dependent(model)):
        if kind == "longrope":
            text = torch.zeros(1, limit + 1, dtype=torch.long, device=model.device)
            word = cache_word(type(model).prepare_inputs_for_generation)
            inputs = model.prepare_inputs_for_generation(text, **{word: _Seen(limit)}, use_cache=True)
            if inputs.get(word) is None:
                return limit
    return None


class _Seen:
    """Looks like a cache of `tokens` tokens to a model that prepares its next forward."""

    is_compileable = False

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return 1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._tokens
