"""Where transformers 5.19 differs from a model's own definition, mended on the loaded model.

- Its default attention (sdpa) drops the cap on attention scores that Gemma 2 and its relatives are trained with.
- Phi-3 and its relatives recompute the text when it outgrows the short frequencies; generate() then gives them only the
  last token, and all tokens before it are forgotten.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from ragspec.models.forwards import cache_word
from ragspec.models.rotary import length_dependent

CAP = "attn_logit_softcapping"


def mend(model: Any) -> Any:
    """Return `model`, mended in place."""
    if getattr(model.config.get_text_config(), CAP, None) and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
    if any("longrope" in str(module.rope_type) for module in length_dependent(model)):
        model.prepare_inputs_for_generation = MethodType(_with_all_tokens, model)
    return model


def _with_all_tokens(model: Any, input_ids: Any, **kwargs: Any) -> dict[str, Any]:
    """Prepare a forward as the model does, with all tokens when it drops its cache."""
    prepare = type(model).prepare_inputs_for_generation
    word = cache_word(prepare)
    inputs: dict[str, Any] = prepare(model, input_ids, **kwargs)
    if kwargs.get(word) is not None and inputs.get(word) is None:
        inputs = prepare(model, input_ids, **kwargs | {word: None, "next_sequence_length": None, "position_ids": None})
    return inputs
