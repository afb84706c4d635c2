"""Classes of one MLP per layer whose attention sees all before a token, or a window of it."""

from __future__ import annotations

from typing import Any

from tests.zoo.layers import KINDS, layers
from tests.zoo.tiny import VOCAB, WINDOW

PLAIN: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "codegen": {},
    "cohere": {},
    "cpmant": {"prompt_types": 4, "prompt_length": 4, "segment_types": 4, "position_bias_num_buckets": 8},
    "ctrl": {},
    "diffllama": {},
    "ernie4_5": {},
    "falcon": {},
    "gemma": {},
    "glm": {},
    "glm4": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gptj": {},
    "granite": {"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "helium": {},
    "hrm_text": {"H_cycles": 2, "L_cycles": 1, "prefix_lm": False},
    "hunyuan_v1_dense": {},
    "hyperclovax": {},
    "jais2": {},
    "llama": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "openai-gpt": {},
    "opt": {"word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "seed_oss": {},
    "stablelm": {},
    "xglm": {},
    # positions as a bias of the scores
    "bloom": {},
    "mpt": {},
}
ROTATIONS = {KINDS[kind]: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]} for kind in "SF"}
SHARED_KEYS = layers("SFSF") | {"num_kv_shared_layers": 2}
PER_LAYER_INPUT = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
WINDOWED: dict[str, dict[str, Any]] = {
    "cohere2": layers("SSF"),
    "cohere_compass_text": layers("SF") | {"rope_parameters": ROTATIONS},
    "cwm": layers("FSS"),
    "doge": {"sliding_window": None, "keep_window_size": WINDOW},
    "exaone4": layers("SSF"),
    "gemma2": layers("SFS")
    | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0, "query_pre_attn_scalar": 8},
    "gemma3_text": layers("SSF") | {"query_pre_attn_scalar": 8},
    "gemma3n_text": SHARED_KEYS
    | PER_LAYER_INPUT
    | {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0]},
    "gemma4_text": SHARED_KEYS | PER_LAYER_INPUT | {"global_head_dim": 16},
    "gemma4_unified_text": SHARED_KEYS | {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_swa": layers("FSS"),
    "ministral": layers("SF"),
    "ministral3": {},
    "mistral": {},
    "modernbert-decoder": layers("FSS") | {"local_attention": 2 * WINDOW},
    "olmo3": layers("SSF"),
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {},
    "vaultgemma": layers("SF") | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0},
}
