"""Classes that keep a state instead of keys and values, in some layers or in all."""

from __future__ import annotations

from typing import Any

from tests.zoo.layers import layers

DELTA = {  # gated delta rule
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 12,
    "indexer_compress_ratio": 4,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "falcon_mamba": {},
    "granitemoehybrid": layers("LF"),
    "inkling_text": layers("WH", "ds")
    | {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "d_rel": 4,
        "rel_extent": 32,
        "logits_mup_width_multiplier": 1.0,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": layers("LF", "ds") | {"linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4},
    "lfm2": layers("VF"),
    "lfm2_moe": layers("VF") | {"num_dense_layers": 1},
    "mamba": {},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "minimax": layers("FL") | {"block_size": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 24,
        "sliding_window": None,
    },
    "olmo_hybrid": layers("LF") | DELTA,
    "qwen3_5_moe_text": layers("LF") | DELTA,
    "qwen3_5_text": layers("LF") | DELTA,
    "qwen3_next": layers("LF") | DELTA,
    "qwen4_exp_text": layers("LI") | DELTA | INDEXER | {"hc_lowrank": 8, "hc_count": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 32},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "zamba": {"num_hidden_layers": 3},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "adapter_rank": 4,
    },
    "zaya": layers("HW") | {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
