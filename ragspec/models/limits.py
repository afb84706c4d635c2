"""The lengths at which a model changes what it does: windows, chunks, original lengths, named by its config.

A check of a few tokens would not notice them, so they are lowered for it: the model's own code then applies them to a
short text, where the check sees what they do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ragspec.models.rotary import forget, kinds_of, length_dependent

NAMES = re.compile(r"window|chunk|local_attention|index_topk|floor_scale|^original_max_position_embeddings$")
NO_LIMITS = re.compile(r"layer|pattern|mamba|conv|num_")
LOWERED = 12  # tokens
ROTARY = "original_max_position_embeddings"
LONGEST = "max_position_embeddings"
IN_MODULES = {ROTARY: ("original_max_seq_len",), LONGEST: ("original_max_seq_len", "max_seq_len_cached")}


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit that the config names: its key and its tokens."""

    name: str
    tokens: int


def limits_of(inner: Any) -> list[Limit]:
    """Return the lengths that a model's config names, and that its texts can reach."""
    config = inner.config.get_text_config()
    named = [*config.to_dict().items(), *((ROTARY, own[ROTARY]) for own in _rotary(config) if ROTARY in own)]
    longest = getattr(config, LONGEST, None)
    reach = longest if isinstance(longest, int) else 1 << 62
    # dynamic frequencies change where others end
    found = [Limit(LONGEST, limit) for kind, limit in kinds_of(length_dependent(inner)) if kind == "dynamic"]
    for name, value in named:
        if NAMES.search(name) and not NO_LIMITS.search(name) and type(value) is int and 0 < value < reach:
            found.append(Limit(name, value))
    return list(dict.fromkeys(found))


def is_static(inner: Any, limit: Limit) -> bool:
    """Return whether a limit was used when the model was built, and only then (YaRN, Llama 3's frequencies)."""
    return limit.name == ROTARY and not length_dependent(inner)


@contextmanager
def lowered(inner: Any, limit: Limit) -> Iterator[None]:
    """Lower a limit wherever the model keeps it: in its configs, and in its modules."""
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
    """Yield the attributes of everything that may keep a limit: modules, their configs, their rotary parameters."""
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
