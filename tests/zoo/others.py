"""Classes made for something else that answer as causal models too, and those that cannot."""

from __future__ import annotations

from typing import Any

from tests.zoo.dense import WINDOWED
from tests.zoo.layers import layers
from tests.zoo.tiny import VOCAB

BACK = {"is_decoder": True}  # an encoder that looks back only
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": BACK,
    "bert-generation": BACK,
    "big_bird": BACK | {"attention_type": "original_full"},
    "camembert": BACK,
    "data2vec-text": BACK,
    "electra": BACK,
    "ernie": BACK,
    "megatron-bert": BACK,
    "reformer": BACK
    | {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "num_buckets": 4,
        "hash_seed": 1,
    },
    "rembert": BACK | {"input_embedding_size": 32, "output_embedding_size": 32},
    "roberta": BACK,
    "roberta-prelayernorm": BACK,
    "roc_bert": BACK | {"pronunciation_embed_dim": 8, "shape_embed_dim": 8, "shape_vocab_size": VOCAB},
    "roformer": BACK,
    "xlm": {"pad_token_id": 399, "mask_token_id": 5},
    "xlm-roberta": BACK,
    "xlm-roberta-xl": BACK,
    "xlnet": {"d_head": 8, "initializer_range": 1.0},
    "xmod": BACK | {"default_language": "en_XX"},
}
HALVES: dict[str, dict[str, Any]] = {  # the decoders of encoder-decoders, by themselves
    "bart": BACK,
    "bigbird_pegasus": BACK,
    "blenderbot": BACK,
    "blenderbot-small": BACK,
    "marian": BACK | {"scale_embedding": True},
    "mbart": BACK,
    "mvp": BACK,
    "pegasus": BACK | {"scale_embedding": True},
    "plbart": BACK,
    "prophetnet": BACK,
    "trocr": BACK,
    "whisper": {"max_source_positions": 32},
}
VISION = {"image_size": 28, "patch_size": 14}
QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SENSES: dict[str, dict[str, Any]] = {  # models that see, hear or speak too, asked about text
    "emu3": {
        "vq_config": {"base_channels": 32, "embed_dim": 4, "hidden_size": 32, "codebook_size": 16},
        "vocabulary_map": {"<image>": 1},
    },
    "fuyu": {"image_token_id": 399},
    "gemma3": {
        "text_config": layers("SSF") | {"query_pre_attn_scalar": 8},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 399,
    },
    "gemma4": {
        "text_config": WINDOWED["gemma4_text"],
        "vision_config": {"position_embedding_size": 16},
        "audio_config": {"output_proj_dims": 32},
    },
    "gemma4_unified": {
        "text_config": WINDOWED["gemma4_unified_text"],
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32},
        "audio_config": {"audio_embed_dim": 8},
    },
    "git": {"vision_config": VISION},
    "got_ocr2": {
        "text_config": QWEN2,
        "vision_config": VISION | {"output_channels": 8, "mlp_dim": 48, "global_attn_indexes": [1]},
        "image_token_index": 399,
    },
    "mllama": {
        "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": VISION | {"vision_output_dim": 32, "num_global_layers": 1},
    },
    "moshi": {"num_codebooks": 2, "audio_encoder_config": {"model_type": "mimi", "codebook_size": 16}},
    "phi4_multimodal": {
        "vision_config": VISION | {"crop_size": 28, "image_token_id": 398},
        "audio_config": {
            "num_blocks": 1,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 8,
            "audio_token_id": 399,
        },
    },
}
BYTES: dict[str, dict[str, Any]] = {  # patches of bytes
    "blt": {
        "num_hidden_layers": 2,
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
        "global_config": {"hidden_size": 64},
    }
}
HEAD = "it drafts from the keys and values of a Gemma 4 and cannot answer alone"
SOUND = "it writes the codes of a sound, and transformers builds no causal model from its config"
ABSENT = {
    "gemma3n": "its vision part needs the package timm; gemma3n_text is the same language model",
    "gemma4_assistant": HEAD,
    "gemma4_unified_assistant": HEAD,
    "musicgen": SOUND,
    "musicgen_melody": SOUND,
}
