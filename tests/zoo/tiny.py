"""A tiny random model of any class: what a small config has in place of the default, and weights that decide.

    >>> model = build("llama", {"num_hidden_layers": 3})

Limit: what a class needs beyond the names below stands in its entry (classes.py).
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

VOCAB = 400
POSITIONS = 256
WINDOW = 10
CHUNK = 16
STD = 0.3
LEAST_STD = 0.1  # below this, a family's own initialisation leaves the next token a tie

SMALL: dict[str, Any] = {
    # widths
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "dff": 48,
    "dim_ff": 48,
    "d_inner": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 24,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "dense_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    # depths
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,  # a decoder by itself takes its number of caches from here
    "num_decoder_layers": 2,
    "num_encoder_layers": 2,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "kv_channels": 8,
    "dim_head": 8,
    "rotary_dim": 4,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # limits
    "max_position_embeddings": POSITIONS,
    "n_positions": POSITIONS,
    "n_ctx": POSITIONS,
    "max_seq_len": POSITIONS,
    "max_target_positions": POSITIONS,
    "context_length": POSITIONS,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_window_size": WINDOW,
    "window_size": WINDOW,
    "local_attention": WINDOW,
    "attention_chunk_size": CHUNK,
    # recurrent states
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "chunk_size": 8,
    # words
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # a tied model of random weights says its last token again
}


def small(kind: Any, settings: dict[str, Any]) -> Any:
    """Return a tiny config. settings: what it has beside SMALL; a dict for a config inside it."""
    names = {field.name for field in dataclasses.fields(kind)}
    own = {name: value for name, value in SMALL.items() if name in names}
    parts = {
        name: small(part, settings.get(name, {}))
        for name, part in (kind.sub_configs or {}).items()
        if dataclasses.is_dataclass(part)
    }
    return kind(**(own | copy.deepcopy(settings) | parts))  # configs write into the dicts that they get


def config_class(model_type: str) -> Any:
    """Return the config class of a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def build(model_type: str, settings: dict[str, Any], seed: int = 11) -> Any:
    """Return the causal model of `model_type` in float32, with weights of which every one counts."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(small(config_class(model_type), settings)).eval().float()
    for parameter in model.parameters():
        _stir(parameter.data)
    return model


def _stir(weights: torch.Tensor) -> None:
    """Make weights matter: families differ in what initializer_range reaches; ones and zeros would hide an error."""
    if weights.numel() < 2:
        return
    if weights.dim() > 1 and not weights.std() >= LEAST_STD:
        torch.nn.init.normal_(weights, std=STD)
    elif weights.dim() == 1 and not weights.std() >= 1e-6:
        weights += torch.randn_like(weights) * LEAST_STD
