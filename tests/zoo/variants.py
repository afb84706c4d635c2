"""What one family may be asked for in several ways: a config for each mechanism, with its limit near and far.

Limit: a mechanism stands here with the family that is best known for it, not with all.
"""

from __future__ import annotations

from typing import Any

from tests.zoo.dense import WINDOWED
from tests.zoo.layers import layers
from tests.zoo.sparse import EXPERTS, LATENT
from tests.zoo.tiny import POSITIONS

PRETRAINED = 24  # positions from which on a RoPE is scaled
FAR = 60  # a limit well behind that of the classes: what looks at the first 50 tokens does not see it


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """Return what a config with scaled RoPE says."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}}


def yarn(**more: Any) -> dict[str, Any]:
    """Return what a config with YaRN says."""
    return rope("yarn", original_max_position_embeddings=PRETRAINED, beta_fast=32.0, beta_slow=1.0, **more)


def longrope(pretrained: int, parts: int = 4, **more: Any) -> dict[str, Any]:
    """Return what a config says whose long texts have other frequencies. parts: half of the rotated width of a head."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(parts)], "long_factor": [2.0 + i for i in range(parts)]}
    scaled = rope("longrope", original_max_position_embeddings=pretrained, **factors, **more)
    return scaled | {"max_position_embeddings": POSITIONS}


LLAMA3 = rope("llama3", original_max_position_embeddings=PRETRAINED, low_freq_factor=1.0, high_freq_factor=4.0)
WINDOWS_ABOVE = {"use_sliding_window": True, "num_hidden_layers": 3, "max_window_layers": 1}
OPEN = {"sliding_window": None}
PHI = {"original_max_position_embeddings": PRETRAINED}  # the Phi family reads it here, too
GEMMA4 = WINDOWED["gemma4_text"] | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}

ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama: linear RoPE": ("llama", rope("linear")),
    "llama: dynamic RoPE": ("llama", rope("dynamic") | {"max_position_embeddings": PRETRAINED}),
    "llama: dynamic RoPE, far": ("llama", rope("dynamic") | {"max_position_embeddings": FAR}),
    "llama: YaRN": ("llama", yarn()),
    "llama: llama3 RoPE": ("llama", LLAMA3),
    "llama: LongRoPE": ("llama", longrope(PRETRAINED)),
    "phi3: LongRoPE": ("phi3", OPEN | PHI | longrope(PRETRAINED)),
    "phi3: LongRoPE, far": ("phi3", OPEN | longrope(FAR) | {"original_max_position_embeddings": FAR}),
    "phi3: partial LongRoPE and a window": ("phi3", PHI | longrope(PRETRAINED, 2, partial_rotary_factor=0.5)),
    "phimoe: LongRoPE": ("phimoe", OPEN | PHI | longrope(PRETRAINED, short_mscale=1.1, long_mscale=1.2)),
    "minicpm3: LongRoPE": ("minicpm3", LATENT["minicpm3"] | longrope(PRETRAINED, 2)),
    "gpt_oss: YaRN": ("gpt_oss", EXPERTS["gpt_oss"] | yarn()),
    "deepseek_v3: YaRN": ("deepseek_v3", LATENT["deepseek_v3"] | yarn(mscale=1.0, mscale_all_dim=1.0)),
    "olmo3: YaRN": ("olmo3", layers("SSF") | yarn()),
    "ministral3: scaled queries": ("ministral3", OPEN | yarn(llama_4_scaling_beta=0.1)),
    "smollm3: RoPE in every layer": ("smollm3", {"no_rope_layers": [1, 1]}),
}
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral: no window": ("mistral", OPEN),
    "mistral: window, far": ("mistral", {"sliding_window": FAR}),
    "qwen2: windows in upper layers": ("qwen2", WINDOWS_ABOVE),
    "qwen2: windows in upper layers, far": ("qwen2", WINDOWS_ABOVE | {"sliding_window": FAR}),
    "qwen2_moe: windows in upper layers": ("qwen2_moe", WINDOWS_ABOVE),
    "qwen2_moe: windows in upper layers, far": ("qwen2_moe", WINDOWS_ABOVE | {"sliding_window": FAR}),
    "qwen3: windows in upper layers": ("qwen3", WINDOWS_ABOVE),
    "qwen3_moe: window": ("qwen3_moe", {"use_sliding_window": True}),
    "qwen3_moe: window, far": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": FAR}),
    "smollm3: windows": ("smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": True}),
    "gemma3_text: window, far": ("gemma3_text", layers("SSF") | {"sliding_window": FAR}),
    "gpt_neo: window, far": ("gpt_neo", WINDOWED["gpt_neo"] | {"window_size": FAR}),
    "gpt_oss: window, far": ("gpt_oss", EXPERTS["gpt_oss"] | {"sliding_window": FAR}),
    "phimoe: no window": ("phimoe", OPEN),
    "phimoe: window, far": ("phimoe", {"sliding_window": FAR}),
    "llama4_text: chunks, far": ("llama4_text", EXPERTS["llama4_text"] | {"attention_chunk_size": FAR}),
    "doge: keeps the best, far": ("doge", OPEN | {"keep_window_size": FAR}),
    "deepseek_v32: index, far": ("deepseek_v32", LATENT["deepseek_v32"] | {"index_topk": FAR}),
}
SCORES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2: no softcap": ("gemma2", layers("SF") | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2: window, far": ("gemma2", WINDOWED["gemma2"] | {"sliding_window": FAR}),
    "falcon: ALiBi": ("falcon", {"alibi": True}),
    "falcon: new decoder": ("falcon", {"new_decoder_architecture": True}),
    "mpt: no ALiBi": ("mpt", {"attn_config": {"alibi": False}}),
    "gpt_bigcode: several key heads": ("gpt_bigcode", {"multi_query": False}),
    "stablelm: parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
}
WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama: tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "llama: biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "granite: biases": ("granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.3}),
    "deepseek_v2: no query latent": ("deepseek_v2", LATENT["deepseek_v2"] | {"q_lora_rank": None}),
    "doge: experts": ("doge", OPEN | {"keep_window_size": POSITIONS, "is_moe": True}),
    "gemma4_text: experts": ("gemma4_text", GEMMA4 | {"enable_moe_block": True, "top_k_experts": 2}),
    "gemma4_text: keys are values": (
        "gemma4_text",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
}
VARIANTS = ROPES | WINDOWS | SCORES | WEIGHTS

# what a model's generation_config may ask for that changes plain decoding, and that no key of ours sets
ASKED: dict[str, dict[str, Any]] = {
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[i] for i in range(20, 120)]},
    "suppress_tokens": {"suppress_tokens": list(range(20, 120))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(1, 395))},
    "sequence_bias": {"sequence_bias": [[[7], 9.0], [[31], 9.0]]},
    "forced_eos_token_id": {"forced_eos_token_id": 5},
    "guidance_scale": {"guidance_scale": 3.0},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.9},
}
