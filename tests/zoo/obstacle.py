"""What a model's own declarations say against packed rows, in words for a user."""

from __future__ import annotations

import inspect
import sys
from typing import Any


def obstacle(model: Any) -> str:
    """Return why no engine that replaces cache and attention can run `model` as it stands, or ""."""
    if _keeps_state(model):
        return "it keeps a recurrent state"
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(sys.modules[type(model).__module__]):
        return "its attention is not pluggable"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it numbers its tokens itself"
    return ""


def _keeps_state(model: Any) -> bool:
    from transformers import DynamicCache

    if model._is_stateful:
        return True
    config = model.config.get_text_config(decoder=True)
    return hasattr(config, "num_hidden_layers") and any(DynamicCache(config=config).is_linear)
