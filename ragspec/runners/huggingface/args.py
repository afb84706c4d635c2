"""`runner_args` of the Hugging Face runner."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ragspec.config.secret import Settings
from ragspec.runners.base import RunnerArgs


def _word(value: Any) -> Any:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # YAML reads on and off as booleans


OnOff = Annotated[
    Literal["auto", "on", "off"], BeforeValidator(_word, json_schema_input_type=Literal["auto", "on", "off"] | bool)
]


class Args(RunnerArgs):
    """`runner_args` of the Hugging Face runner."""

    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Records at a time. `auto`: as many as fit in memory and increase throughput; the run says what it chose. With
    stock `generate()`, 8 without speculation, otherwise 1."""
    engine: Literal["auto", "ragspec", "transformers"] = "auto"
    """`auto`: ragspec's batched engine if possible, otherwise stock `generate()`. `ragspec` makes the fallback an
    error, `transformers` forces `generate()`."""
    lookahead: Annotated[int, Field(ge=1)] = 4096
    """Records read ahead, to group those that share a prefix."""
    compile: OnOff = "auto"
    """Compile code for this machine. On CPUs, with its C++ compiler: kernels, and layers, each as a single call (some
    seconds, once); elsewhere, layers with torch's inductor (half a minute, once). `auto` compiles layers if the input
    is long enough to be worth it, and keeps them if they measure faster. `off` compiles nothing."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is float32 on a CPU and the model's own dtype elsewhere."""
    device: str = "auto"
    """`cuda`, `mps` or `cpu`; `auto` uses the first one available."""
    num_gpus: Annotated[int, Field(ge=0)] | None = None
    """0: run on the CPU; 2 or more: spread the layers over that many GPUs."""
    revision: str | None = None
    """The model's revision on the hub."""
    trust_remote_code: bool = False
    """Run code that comes with the model. The draft model has its own switch (`speculation.draft_trust_remote_code`);
    embedding models and rerankers never run any."""
    model_args: Settings = {}
    """Passed to the model's `from_pretrained`. Only safetensors weights are loaded, unless this contains
    `use_safetensors: false`."""
    tokenizer_args: Settings = {}
    """Passed to the tokenizer's `from_pretrained`."""
    encode_args: Settings = {}
    """Passed to every tokenizer call."""
    generate_args: Settings = {}
    """Overrides the model's `generation_config`. Both engines support settings that only change logits
    (`no_repeat_ngram_size`, `suppress_tokens`, `min_new_tokens`, ...); anything else falls back to stock
    `generate()`."""

    def neutral_keys(self) -> set[str]:
        return {"batch_size", "lookahead", "compile"}
