"""Whether vLLM's whole step can be one CUDA graph where drafts differ in length.

    if allows_ragged_graphs(config): engine_args["compilation_config"] = {"cudagraph_mode": "FULL"}

By default vLLM has full graphs only for steps whose rows all have equally many tokens, and launches the others in
pieces, each layer's attention from Python: a fifth of a step of 64 rows on an H100. Attention backends say themselves
whether they can do without pieces. Source: vLLM 0.32, config/compilation.py, v1/attention/backend.py
(AttentionCGSupport). Limit: models of one kind of attention.
"""

from __future__ import annotations

from typing import Any

DEFAULT = "FULL_AND_PIECEWISE"  # vLLM's choice where nothing asks for another


def allows_ragged_graphs(config: Any) -> bool:
    """Return whether steps of any shape can be graphs in an engine of this VllmConfig, which has pieces by default."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    model, mode = config.model_config, config.compilation_config.cudagraph_mode
    if mode is None or mode.name != DEFAULT or model.is_hybrid or model.is_attention_free:
        return False
    if model.attention_chunk_size is not None:  # attention in chunks, as in Llama 4, has no graphs at all
        return False
    heads, size = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size, num_kv_heads=heads, head_size=size, dtype=model.dtype
    )
    try:
        with set_current_vllm_config(config):
            backend = get_attn_backend(size, model.dtype, config.cache_config.cache_dtype, use_mla=model.use_mla)
            support = backend.get_builder_cls().get_cudagraph_support(config, spec)
    except Exception:  # no backend for it, in whatever words; vLLM says so when it starts
        return False
    return bool(support == AttentionCGSupport.ALWAYS)
