"""Differences between models and between versions of transformers: argument names, rounding, length limits, padding.

Limits are lowered for checks of a few tokens: the model's own code then applies them to a short text, where the check
sees the effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from ragspec.models.draft import width_of


def cache_argument(code: Callable[..., Any]) -> str:
    """Return the name of a forward's cache argument: `cache` since transformers 5.24, before `past_key_values`."""
    return "cache" if "cache" in signature(code).parameters else "past_key_values"


# -- rounding --------------------------------------------------------------------------------------

OF_LARGEST = {torch.float32: 1e-3, torch.float64: 1e-6}  # relative to the largest logit; other dtypes: HALF
HALF = 5e-2


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest difference, relative to the largest logit, that counts as rounding."""
    return OF_LARGEST.get(dtype, HALF)


# -- length limits ---------------------------------------------------------------------------------

# config keys of windows, chunks and original lengths, at which a model's computation changes
NAMES = re.compile(r"window|chunk|local_attention|index_topk|floor_scale|^original_max_position_embeddings$")
NO_LIMITS = re.compile(r"layer|pattern|mamba|conv|num_")
LOWERED = 12  # tokens
ROTARY = "original_max_position_embeddings"
LONGEST = "max_position_embeddings"
IN_MODULES = {ROTARY: ("original_max_seq_len",), LONGEST: ("original_max_seq_len", "max_seq_len_cached")}


@dataclass(frozen=True, slots=True)
class Limit:
    """A length limit in a model's config: its key and its tokens."""

    name: str
    tokens: int


def limits_of(inner: Any) -> list[Limit]:
    """Return the length limits in a model's config that its texts can reach."""
    config = inner.config.get_text_config()
    named = [*config.to_dict().items(), *((ROTARY, own[ROTARY]) for own in _rotary(config) if ROTARY in own)]
    longest = getattr(config, LONGEST, None)
    reach = longest if isinstance(longest, int) else 1 << 62
    # dynamic frequencies change beyond the maximum length
    found = [Limit(LONGEST, limit) for kind, limit in kinds_of(length_dependent(inner)) if kind == "dynamic"]
    for name, value in named:
        if NAMES.search(name) and not NO_LIMITS.search(name) and type(value) is int and 0 < value < reach:
            found.append(Limit(name, value))
    return list(dict.fromkeys(found))


def is_static(inner: Any, limit: Limit) -> bool:
    """Return whether a limit was applied once when the model was built (YaRN, Llama 3's frequencies)."""
    return limit.name == ROTARY and not length_dependent(inner)


@contextmanager
def lowered(inner: Any, limit: Limit) -> Iterator[None]:
    """Lower a limit in all of a model's configs and modules; restore it at the end."""
    names = (limit.name, *IN_MODULES.get(limit.name, ()))
    found = [(held, name) for held in _holders(inner) for name in names if held.get(name) == limit.tokens]
    for held, name in found:
        held[name] = LOWERED
    try:
        yield
    finally:
        for held, name in found:
            held[name] = limit.tokens
        for module in length_dependent(inner):
            forget(module)


def _holders(inner: Any) -> Iterator[dict[str, Any]]:
    """Yield the attributes of everything that may hold a limit: modules, configs, rotary parameters."""
    seen: set[int] = set()
    for module in inner.modules():
        config = getattr(module, "config", None)
        text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else None
        rotary = _rotary(text) if text is not None else []
        for held in (vars(module), *(vars(one) for one in (config, text) if hasattr(one, "__dict__")), *rotary):
            if id(held) not in seen:
                seen.add(id(held))
                yield held


def _rotary(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(own for own in parameters.values() if isinstance(own, dict))]


# -- length-dependent rotary embeddings ------------------------------------------------------------

# Dynamic NTK and LongRoPE. transformers takes a forward's frequencies from its largest position, and the modules keep
# the longest length seen. Source: transformers 5.19 to 5.24, modeling_rope_utils.dynamic_rope_update.
LENGTH_DEPENDENT = ("dynamic", "longrope")


def length_dependent(model: Any) -> list[Any]:
    """Return the modules of a model whose rotary frequencies depend on the text's length."""
    return [module for module in model.modules() if hasattr(module, "rope_type") and kind_of(module)]


def kind_of(module: Any) -> str:
    """Return the type of a rotary module's frequencies if they depend on the length, else ""."""
    types = module.rope_type.values() if isinstance(module.rope_type, dict) else [module.rope_type]
    return next((kind for kind in LENGTH_DEPENDENT if any(kind in own for own in types if own)), "")


def limit_of(module: Any) -> int:
    """Return the length beyond which a rotary module's frequencies change."""
    if kind_of(module) == "dynamic":
        return int(module.config.max_position_embeddings)
    parameters = module.config.rope_parameters
    if "original_max_position_embeddings" not in parameters:  # one set per layer type
        parameters = next(own for own in parameters.values() if own.get("rope_type") == "longrope")
    return int(parameters["original_max_position_embeddings"])


def kinds_of(modules: Iterable[Any]) -> list[tuple[str, int]]:
    """Return the types of rotary modules with the lengths beyond which their frequencies change."""
    return sorted({(kind_of(module), limit_of(module)) for module in modules})


def effective_length(length: int, kind: str, limit: int) -> int:
    """Return the shortest length with the frequencies of `length`."""
    return max(length, limit) if kind == "dynamic" else limit + (length > limit)


def forget(module: Any) -> None:
    """Reset the longest length that a rotary module has seen; it would change the next record's frequencies."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            setattr(module, name.replace("original_inv_freq", "inv_freq"), buffer.clone())  # modified in place later
    for name in list(vars(module)):
        if name.endswith("max_seq_len_cached"):
            setattr(module, name, module.original_max_seq_len)


def restart_length(model: Any) -> int | None:
    """Return the length beyond which generate() recomputes the whole text, None if it never does.

    Phi-3 and its relatives do so when an answer outgrows the short frequencies, in the model's own code.
    """
    for kind, limit in kinds_of(length_dependent(model)):
        if kind == "longrope":
            text = torch.zeros(1, limit + 1, dtype=torch.long, device=model.device)
            word = cache_argument(type(model).prepare_inputs_for_generation)
            inputs = model.prepare_inputs_for_generation(text, **{word: _CacheStub(limit)}, use_cache=True)
            if inputs.get(word) is None:
                return limit
    return None


class _CacheStub:
    """A stand-in for a cache of `tokens` tokens."""

    is_compileable = False

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return 1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._tokens


# -- padding ---------------------------------------------------------------------------------------

LENGTHS = (5, 12, 27)  # tokens of the compared prompts
PERIODS = (1000, 6)  # repeating tokens create ties in a model that keeps the best of its past


@torch.inference_mode()
def takes_padding(model: Any, pad: int) -> bool:
    """Return whether `model` computes the same in a padded batch as for each prompt alone.

    Models that assign positions themselves, or whose masks ignore padding, do not; some only beyond a length limit, so
    each limit is lowered once. Checked for every model that stock generate() runs in batches.
    """
    for limit in (None, *limits_of(model)):
        with lowered(model, limit) if limit else nullcontext():
            if not all(_is_the_same_padded(model, pad, period) for period in PERIODS):
                return False
    return True


def _is_the_same_padded(model: Any, pad: int, period: int) -> bool:
    width = width_of(model.config)
    prompts = [[(7919 * (i % period) + 11 * length + 1) % width for i in range(length)] for length in LENGTHS]
    alone = torch.cat([_logits(model, [prompt], pad) for prompt in prompts])
    together = _logits(model, prompts, pad)
    largest = alone[alone.isfinite()].abs().max().clamp_min(1e-6)
    differences = (together - alone)[alone.isfinite() & together.isfinite()].abs()
    return bool(differences.max() <= tolerance(model.dtype) * largest)


def _logits(model: Any, prompts: list[list[int]], pad: int) -> torch.Tensor:
    """Return the logits of the first two new tokens, (prompts, 2, vocab), as generate() computes them."""
    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    output = model.generate(
        input_ids=torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=2,
        min_new_tokens=2,
        do_sample=False,
        num_beams=1,
        pad_token_id=pad,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(output.logits, 1).float()
