"""Classes that compute a part: some of several MLPs, keys unfolded from a latent, keys that an index chose."""

from __future__ import annotations

from typing import Any

from tests.zoo.layers import layers
from tests.zoo.tiny import CHUNK, WINDOW

EXPERTS: dict[str, dict[str, Any]] = {
    "afmoe": layers("SSF"),
    "aria_text": {},
    "cohere2_moe": layers("SSF", "dss"),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 2.0},
        "ffn_config": {"moe_top_k": 2},
    },
    "dots1": layers("SF") | {"n_shared_experts": 1},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_interval": 1},
    "exaone_moe": layers("SF"),
    "flex_olmo": {},
    "glm4_moe": {"use_qk_norm": True},
    "gpt_oss": layers("SF"),
    "granitemoe": {},
    "granitemoe_swa": layers("FSS"),
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "jetmoe": {},
    "laguna": layers("FSS", "dss"),
    "llama4_text": layers("CCF") | {"no_rope_layers": [1, 1, 0], "floor_scale": CHUNK},
    "mellum": layers("FS", "ss"),
    "mimo_v2_flash": layers("FSS", "dss"),
    "minimax_m2": {},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {"decoder_sparse_step": 2},
    "qwen3_moe": {},
    "solar_open": {},
}
EACH_ITS_OWN = {"num_key_value_heads": 4}  # the latent is unfolded for every head
INDEX = EACH_ITS_OWN | {"index_topk": WINDOW, "index_head_dim": 8, "index_n_heads": 2}
LATENT: dict[str, dict[str, Any]] = {
    "axk1": EACH_ITS_OWN,
    "axk2": INDEX,
    "deepseek_v2": EACH_ITS_OWN,
    "deepseek_v3": EACH_ITS_OWN | {"n_group": 2},
    "deepseek_v32": INDEX,
    "deepseek_v4": INDEX
    | {
        "num_hidden_layers": 3,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_sinkhorn_iters": 3,
    },
    "glm4_moe_lite": EACH_ITS_OWN,
    "glm_moe_dsa": INDEX,
    "hy_v4": INDEX | {"hc_mult": 2},
    "longcat_flash": EACH_ITS_OWN | {"head_dim": 4, "zero_expert_num": 2},
    "minicpm3": EACH_ITS_OWN,
    "minimax_m3_vl_text": EACH_ITS_OWN
    | {
        "index_head_dim": 8,
        "index_n_heads": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
    "youtu": EACH_ITS_OWN,
}
