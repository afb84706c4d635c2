"""Heads of random weights that fit a model, in the layouts in which trained ones are published."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SPREAD = 0.02  # of the weights, as models are initialised
FFN = 64


def save(folder, config, tensors):
    """Write a checkpoint and return its folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def config_of(target):
    """Return the config of the model in the folder `target`."""
    return json.loads((Path(target) / "config.json").read_text())


def matrix(rows, columns):
    return torch.randn(rows, columns) * SPREAD


def attention(like, prefix, width=None):
    """Return the projections of one attention layer. width: of what goes in, the hidden size by default."""
    hidden, size = like["hidden_size"], like["head_dim"]
    queries, keys = like["num_attention_heads"] * size, like["num_key_value_heads"] * size
    shapes = {"q": (queries, width or hidden), "k": (keys, width or hidden), "v": (keys, width or hidden)}
    made = {f"{prefix}.self_attn.{name}_proj.weight": matrix(*shape) for name, shape in shapes.items()}
    return made | {f"{prefix}.self_attn.o_proj.weight": matrix(hidden, queries)}


def feed_forward(like, prefix):
    hidden, inner = like["hidden_size"], like["intermediate_size"]
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {f"{prefix}.mlp.{name}_proj.weight": matrix(*shape) for name, shape in shapes.items()}


def norms(like, *names):
    return {f"{name}.weight": torch.ones(like["hidden_size"]) for name in names}


def head_config(target, **changes):
    """Return the config of a one-layer head for `target`: its sizes, except for a small feed-forward layer."""
    left = {key: value for key, value in config_of(target).items() if key not in ("dtype", "torch_dtype")}
    return left | {"num_hidden_layers": 1, "intermediate_size": FFN, "tie_word_embeddings": False} | changes


def save_eagle(folder, target):
    """The layout of yuhuili/EAGLE-LLaMA3-Instruct-8B: a layer without an input norm; the target's output matrix."""
    config = head_config(target, architectures=["LlamaForCausalLM"])
    hidden = config["hidden_size"]
    tensors = {"fc.weight": matrix(hidden, 2 * hidden)} | attention(config, "layers.0")
    tensors |= feed_forward(config, "layers.0") | norms(config, "layers.0.post_attention_layernorm")
    tensors["embed_tokens.weight"] = matrix(config["vocab_size"], hidden)
    return save(folder, config, tensors)


def save_eagle3(folder, target, draft_vocab_size=8192):
    """The layout of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: a smaller vocabulary of its own, with a map (d2t, t2d)."""
    config = head_config(target, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=draft_vocab_size)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    ids = torch.randperm(vocabulary)[:draft_vocab_size].sort().values
    tensors = {"fc.weight": matrix(hidden, 3 * hidden), "lm_head.weight": matrix(draft_vocab_size, hidden)}
    tensors |= attention(config, "midlayer", 2 * hidden) | feed_forward(config, "midlayer")
    layer_norms = [f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    tensors |= norms(config, "norm", *layer_norms)
    tensors["d2t"] = ids - torch.arange(draft_vocab_size)
    tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    return save(folder, config, tensors)


def save_medusa(folder, target, heads=3):
    """The layout of abhigoyal/vllm-medusa-llama-68m-random: a block and an output matrix per head."""
    like = config_of(target)
    sizes = {key: like[key] for key in ("hidden_size", "vocab_size")}
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": heads, "num_hidden_layers": 1}
    tensors = {}
    for head in range(heads):
        tensors[f"blocks.{head}.layers.0.weight"] = matrix(sizes["hidden_size"], sizes["hidden_size"])
        tensors[f"lm_heads.{head}.weight"] = matrix(sizes["vocab_size"], sizes["hidden_size"])
    return save(folder, config | sizes | {"max_paths": 64, "topk": 10}, tensors)


def save_dflash(folder, target, **dflash):
    """The layout of z-lab/Qwen3-8B-DFlash-b16: layers that read features of the target's; no embeddings, no head."""
    features = {"mask_token_id": 0, "target_layer_ids": [1, 8, 15]} | dflash
    changes = {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "block_size": 8}
    config = head_config(target, dflash_config=features, attention_bias=False, **changes)
    hidden = config["hidden_size"]
    tensors = {"fc.weight": matrix(hidden, len(features["target_layer_ids"]) * hidden)}
    tensors |= attention(config, "layers.0") | feed_forward(config, "layers.0")
    for name in ("q_norm", "k_norm"):
        tensors[f"layers.0.self_attn.{name}.weight"] = torch.ones(config["head_dim"])
    layer_norms = ["layers.0.input_layernorm", "layers.0.post_attention_layernorm"]
    return save(folder, config, tensors | norms(config, "hidden_norm", "norm", *layer_norms))


def save_mimo(folder, target):
    """A tiny target with one MTP layer, in the layout of XiaomiMiMo/MiMo-7B-Base, with the tokenizer of `target`.

    Its own `model_type` comes with code; the architecture is Qwen2's, whose configuration it extends.
    """
    from transformers import AutoTokenizer

    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    extra = {"num_nextn_predict_layers": 1, "use_sliding_window": False, "dtype": "float32"}
    changes = {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_hidden_layers": 2}
    config = head_config(target, **sizes, **changes, **extra)
    wide, embeddings = matrix(64, 128), (config["vocab_size"], 64)
    tensors = {"lm_head.weight": matrix(*embeddings), "model.embed_tokens.weight": matrix(*embeddings)}
    for layer in ("model.layers.0", "model.layers.1", "model.mtp_layers.0"):
        tensors |= attention(config, layer) | feed_forward(config, layer)
        tensors |= norms(config, f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
        for name, rows in {"q": 64, "k": 32, "v": 32}.items():
            tensors[f"{layer}.self_attn.{name}_proj.bias"] = torch.randn(rows)
    tensors |= norms(config, "model.norm")
    tensors |= norms(config, *(f"model.mtp_layers.0.{name}_layernorm" for name in ("token", "hidden", "final")))
    tensors["model.mtp_layers.0.input_proj.weight"] = wide
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return save(folder, config, {name: tensor * (15 if tensor.dim() > 1 else 1) for name, tensor in tensors.items()})
