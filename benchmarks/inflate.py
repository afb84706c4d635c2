"""A small Llama inside a large one: the answers of the small one, at the cost of the large one.

    python benchmarks/inflate.py demo out/8b --shape 8b

For measuring on a GPU without downloading a large model. Every weight of the small model stands where it acts as
before. What is left of the large shape costs time and changes nothing: extra heads and neurons are random, but their
outputs meet zeros; extra layers add zero. So answers, drafts and their acceptance are real. RMSNorm's mean is over more
dimensions, which are zero: its weight and epsilon are scaled. Rotary pair i of a small head is pair i x (D / d) of a
large one.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ragspec.models.resolve import resolve


class Shape(NamedTuple):
    """Sizes of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    neurons: int


SHAPES = {  # of Llama 3.1 8B, of Llama 3.2 3B, and one for trying this out
    "8b": Shape(4096, 32, 32, 8, 128, 14336),
    "3b": Shape(3072, 28, 24, 8, 128, 8192),
    "tiny": Shape(1024, 32, 16, 4, 128, 2048),
}
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
SCALE = 0.02  # of random weights


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape of a model by its config.json."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, head = config["num_key_value_heads"], config.get("head_dim") or hidden // heads
    return Shape(hidden, config["num_hidden_layers"], heads, kv_heads, head, config["intermediate_size"])


class Inflated:
    """The weights of the large model. weights: the small one's, by name, in float32."""

    def __init__(self, weights: Mapping[str, torch.Tensor], small: Shape, large: Shape, device: str) -> None:
        if large.head % small.head or small.heads // small.kv_heads > large.heads // large.kv_heads or small > large:
            raise SystemExit(f"{small} does not fit into {large}")
        self.layers = max(small.layers, large.layers)
        self._weights = weights
        self._small, self._large = small, large
        self._random = torch.Generator(device).manual_seed(0)
        self._device = device
        stretch, groups, more = large.head // small.head, small.heads // small.kv_heads, large.heads // large.kv_heads
        half = torch.arange(small.head // 2) * stretch
        inside = torch.cat([half, large.head // 2 + half])  # of a head: its rotary pairs
        queries = [(head // groups * more + head % groups) * large.head for head in range(small.heads)]
        self._queries = torch.cat([start + inside for start in queries])
        self._keys = torch.cat([head * large.head + inside for head in range(small.kv_heads)])
        self._hidden, self._neurons = torch.arange(small.hidden), torch.arange(small.neurons)

    def ends(self) -> dict[str, torch.Tensor]:
        """Return the embedding, the last norm and the output layer."""
        embedding = self._weights["model.embed_tokens.weight"]
        output = self._weights.get("lm_head.weight", embedding)
        everything = torch.arange(len(embedding))
        wide = torch.zeros(len(embedding), self._large.hidden, device=self._device)
        return {
            "model.embed_tokens.weight": self._put(wide, everything, self._hidden, embedding),
            "lm_head.weight": self._put(self._noise(*wide.shape), everything, self._hidden, output),
            "model.norm.weight": self._norm("model.norm.weight"),
        }

    def layer(self, number: int) -> dict[str, torch.Tensor]:
        """Return the weights of a layer; one beyond the small model's adds zero."""
        start = f"model.layers.{number}."
        mine, large, small = number < self._small.layers, self._large, self._small
        hidden, neurons, queries, keys = self._hidden, self._neurons, self._queries, self._keys
        scale = (large.head / small.head) ** 0.5  # of queries: attention divides by the root of the head's size
        found: dict[str, torch.Tensor] = {}

        def add(
            name: str, outputs: int, inputs: int, rows: Any, columns: Any, zero: bool = False, by: float = 1
        ) -> None:
            weight = torch.zeros(outputs, inputs, device=self._device) if zero else self._noise(outputs, inputs)
            if mine:
                if rows is queries or rows is keys:  # what is left of a real head is zero
                    heads = torch.unique(rows // large.head)[:, None] * large.head + torch.arange(large.head)
                    weight[heads.flatten()] = 0
                self._put(weight, rows, columns, self._weights[start + name] * by)
            found[start + name] = weight

        wide = large.heads * large.head
        add("self_attn.q_proj.weight", wide, large.hidden, queries, hidden, by=scale)
        add("self_attn.k_proj.weight", large.kv_heads * large.head, large.hidden, keys, hidden)
        add("self_attn.v_proj.weight", large.kv_heads * large.head, large.hidden, keys, hidden)
        add("self_attn.o_proj.weight", large.hidden, wide, hidden, queries, zero=True)
        add("mlp.gate_proj.weight", large.neurons, large.hidden, neurons, hidden)
        add("mlp.up_proj.weight", large.neurons, large.hidden, neurons, hidden)
        add("mlp.down_proj.weight", large.hidden, large.neurons, hidden, neurons, zero=True)
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            found[start + norm] = self._norm(start + norm if mine else "")
        return found

    def _noise(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=self._random, device=self._device) * SCALE

    def _norm(self, name: str) -> torch.Tensor:
        weight = torch.zeros(self._large.hidden)
        own = self._weights[name] if name else torch.ones(self._small.hidden)
        weight[: self._small.hidden] = own * (self._small.hidden / self._large.hidden) ** 0.5
        return weight

    @staticmethod
    def _put(weight: torch.Tensor, rows: Any, columns: Any, values: torch.Tensor) -> torch.Tensor:
        places = rows[:, None].to(weight.device), columns[None, :].to(weight.device)
        return weight.index_put_(places, values.to(weight.device))


def inflate(source: Path, target: Path, large: Shape, dtype: torch.dtype, device: str) -> int:
    """Write the large model to `target`; return its bytes."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            weights |= {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
    small = shape_of(config)
    inflated = Inflated(weights, small, large, device)
    target.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    size = 0
    for number in range(-1, inflated.layers):
        tensors = inflated.ends() if number < 0 else inflated.layer(number)
        tensors = {name: tensor.to(dtype).contiguous().cpu() for name, tensor in tensors.items()}
        file = f"model-{number + 1:02}.safetensors"
        save_file(tensors, target / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config |= {
        "hidden_size": large.hidden,
        "num_hidden_layers": inflated.layers,
        "num_attention_heads": large.heads,
        "num_key_value_heads": large.kv_heads,
        "head_dim": large.head,
        "intermediate_size": large.neurons,
        "rms_norm_eps": config["rms_norm_eps"] * small.hidden / large.hidden,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in FILES:
        if (source / name).exists():
            shutil.copy(source / name, target / name)
    return size


def main() -> None:
    """Write the model that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", help="a Llama: demo, or a folder")
    parser.add_argument("target", type=Path)
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    source = Path(resolve(args.small).path)
    size = inflate(source, args.target, SHAPES[args.shape], getattr(torch, args.dtype), args.device)
    print(f"{args.target}: {size / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
