"""Why a model cannot run in packed rows, by its own declarations and in words for a user. For a failed self-check."""

from __future__ import annotations

import inspect
import sys
from typing import Any


def obstacle(model: Any) -> str:
    """Return why no engine that replaces cache and attention can run `model` as it stands, or "".

    The words complete a sentence that begins with "it".
    """
    if keeps_state(model):
        return "keeps a recurrent state, which cannot undo a rejected draft"
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(sys.modules[type(model).__module__]):
        return "has its own attention, which cannot be replaced"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "assigns its own token positions"
    return ""


def keeps_state(model: Any) -> bool:
    """Return whether a layer keeps a state in place of keys and values, as the model declares or its own cache does."""
    from transformers import DynamicCache

    if model._is_stateful:
        return True
    config = model.config.get_text_config(decoder=True)
    return hasattr(config, "num_hidden_layers") and any(DynamicCache(config=config).is_linear)
