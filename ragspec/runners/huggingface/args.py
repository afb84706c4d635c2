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
    """Records at a time. `auto`: as many as fit in memory and make the device faster; the run says what it chose. In
    stock `generate()` 8 without speculation, else 1."""
    engine: Literal["auto", "ragspec", "transformers"] = "auto"
    """What answers: ragspec's batched engine if it can, else stock `generate()`. `ragspec` makes the fallback an error,
    `transformers` asks for `generate()`."""
    lookahead: Annotated[int, Field(ge=1)] = 4096
    """Records read ahead, to bring those that share a prefix together."""
    compile: OnOff = "auto"
    """Compile code for this machine, with its C++ compiler: kernels for CPUs, and layers as one call of them each (some
    seconds, once); elsewhere layers through torch's inductor (half a minute, once). `auto` compiles layers where the
    input is long enough to be worth it, and keeps them where they measure faster. `off`: neither."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is float32 on a CPU and the model's own elsewhere."""
    device: str = "auto"
    """`cuda`, `mps` or `cpu`; `auto` takes the first of them that is available."""
    num_gpus: Annotated[int, Field(ge=0)] | None = None
    """0: run on the CPU; 2 or more: spread the layers over that many GPUs."""
    revision: str | None = None
    """Revision of the model on the hub."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Not the draft's (`speculation.draft_trust_remote_code`); embedding models and
    rerankers never run any."""
    model_args: Settings = {}
    """Passed to `from_pretrained` of the model. Weights are safetensors unless `use_safetensors: false` is in it."""
    tokenizer_args: Settings = {}
    """Passed to `from_pretrained` of the tokenizer."""
    encode_args: Settings = {}
    """Passed to every call of the tokenizer."""
    generate_args: Settings = {}
    """Override the model's `generation_config`. Whatever only changes logits (`no_repeat_ngram_size`,
    `suppress_tokens`, `min_new_tokens`, ...) is served by either engine; anything else falls back to stock
    `generate()`."""

    def neutral_keys(self) -> set[str]:
        return {"batch_size", "lookahead", "compile"}
