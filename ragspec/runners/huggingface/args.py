"""`runner_args` of the Hugging Face runner, and their checks.

transformers silently accepts most misspelt keys, so unknown keys are refused here.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ragspec.config.redaction import Settings
from ragspec.config.sections import SpeculationConfig
from ragspec.errors import ConfigError, did_you_mean
from ragspec.runners.base import RunnerArgs
from ragspec.speculation.methods import PLAIN


def _word(value: Any) -> Any:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # YAML reads on and off as booleans


OnOff = Annotated[
    Literal["auto", "on", "off"], BeforeValidator(_word, json_schema_input_type=Literal["auto", "on", "off"] | bool)
]


class Args(RunnerArgs):
    """`runner_args` of the Hugging Face runner."""

    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Batch size. `auto`: as many records as fit in memory and increase throughput; a note reports the choice. With
    stock `generate()`, 8 without speculation, otherwise 1."""
    engine: Literal["auto", "ragspec", "transformers"] = "auto"
    """`auto`: ragspec's batched engine if possible, otherwise stock `generate()`. `ragspec` makes the fallback an
    error, `transformers` forces `generate()`."""
    lookahead: Annotated[int, Field(ge=1)] = 4096
    """Records read ahead, to group those that share a prefix."""
    compile: OnOff = "auto"
    """Compile code for this machine. With its C++ compiler: the drafting code and, on CPUs, kernels and layers, each
    layer as a single call (a few seconds, once). Elsewhere: layers with torch's inductor (half a minute, once). `auto`
    compiles layers if the input is long enough to be worth it, and keeps them if they are faster. `off` compiles
    nothing."""
    attention: Literal["auto", "cpu", "sdpa", "flex"] = "auto"
    """Attention in ragspec's engine: `cpu` is ragspec's kernels, `sdpa` torch's own, `flex` FlexAttention over a paged
    KV cache, which is fast on GPUs. `auto`: `flex` on a CUDA device, elsewhere `cpu` if a C++ compiler is found."""
    graphs: Annotated[
        Literal["auto", "on", "off", "emulate"],
        BeforeValidator(_word, json_schema_input_type=Literal["auto", "on", "off", "emulate"] | bool),
    ] = "auto"
    """Capture the steps of `attention: flex` as CUDA graphs. `auto`: on a CUDA device, if they can be captured.
    `emulate` runs them uncaptured on the same buffers, for tests without a GPU."""
    exact: bool = False
    """Make answers the same bit for bit, with and without speculation, at any batch size, on every GPU of one kind: all
    steps of `attention: flex` get the same shape. Without it, a token may differ where two are almost equally likely.
    Costs padding, but little when many records decode at once."""
    prefix_store: Annotated[str, Field(min_length=1)] | None = None
    """A folder that stores keys and values of long shared prefixes (a system prompt, a document). Later runs of
    ragspec's engine load them instead of computing them where that is faster. Several runs can use it at once."""
    prefix_store_gb: Annotated[float, Field(gt=0)] = 20.0
    """Maximum size of `prefix_store`, in gigabytes; above it, the least recently used files are deleted."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on a CPU, the model's own dtype elsewhere."""
    device: str = "auto"
    """`cuda`, `mps` or `cpu`; `auto` uses the first one available."""
    num_gpus: Annotated[int, Field(ge=0)] | None = None
    """0: run on the CPU; 2 or more: spread the layers over that many GPUs, for a model that does not fit on one. Steps
    then run without CUDA graphs."""
    revision: str | None = None
    """The model's revision on the hub."""
    trust_remote_code: bool = False
    """Run code that comes with the model. The draft model has its own switch (`speculation.draft_trust_remote_code`);
    embedding models and rerankers never run their own code."""
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
        return {"batch_size", "lookahead", "compile", "attention", "graphs", "prefix_store", "prefix_store_gb"}


# -- checks ----------------------------------------------------------------------------------------
OURS = ("max_new_tokens", "max_length", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
DRAFT_KNOBS = ("assistant_lookbehind", "target_lookbehind")


def check_args(args: Args, spec: SpeculationConfig) -> list[str]:
    """Raise ConfigError for arguments that could not work; return notes on those without effect."""
    from ragspec.models.loading import check_device

    check_generate_args(args.generate_args, speculates=spec.method != PLAIN)
    check_encode_args(args.encode_args)
    check_device(args.device)
    check_draft_knobs(spec.extra)
    notes = check_prefix_store(args)
    if spec.num_tokens_by_batch_size is None:
        return notes
    return [
        *notes,
        "speculation.num_tokens_by_batch_size: has no effect on runner huggingface (only on vllm); "
        "num_tokens: auto chooses lengths by what pays",
    ]


def check_prefix_store(args: Args) -> list[str]:
    """Return notes on the store of prefixes. Raises ConfigError if it is no folder."""
    if args.prefix_store is None:
        unused = "prefix_store_gb" in args.model_fields_set
        return ["runner_args.prefix_store_gb: has no effect without prefix_store"] if unused else []
    folder = Path(args.prefix_store).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f'runner_args.prefix_store: "{args.prefix_store}" is not a folder; give one to keep files in')
    return []


def only_stock(args: Args, spec: SpeculationConfig) -> str:
    """Return the first part of a config that only stock generate() supports, or ""."""
    from ragspec.models.logits_processors import SERVED

    unserved = next((key for key in args.generate_args if key not in SERVED), "")
    rules = {
        "runner_args.engine: transformers": args.engine == "transformers",
        f"runner_args.generate_args.{unserved}": unserved,
        "runner_args.model_args.device_map": "device_map" in args.model_args,
        "speculation.schedule": spec.schedule != "constant",
        "speculation.confidence_threshold": spec.confidence_threshold is not None,
        "speculation.extra": spec.extra,
    }
    return next((rule for rule, holds in rules.items() if holds), "")


def check_generate_args(given: Mapping[str, Any], *, speculates: bool) -> None:
    """Raise ConfigError for arguments that generate() lacks, that ragspec sets itself, or that change answers."""
    from transformers import GenerationConfig

    if given.get("num_return_sequences", 1) != 1:
        raise ConfigError(
            "runner_args.generate_args.num_return_sequences: must be 1: ragspec gives one answer per record"
        )
    if given.get("num_beams", 1) != 1 and speculates:
        raise ConfigError(
            f"runner_args.generate_args.num_beams: {given['num_beams']} cannot be combined with speculation; "
            "set speculation.method: none, or remove num_beams"
        )
    if given.get("assistant_ensemble_weight") is not None:
        raise ConfigError("runner_args.generate_args.assistant_ensemble_weight: changes the answers; remove it")
    _refuse_unknown("generate_args", given, set(vars(GenerationConfig())), OURS)


def check_encode_args(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that a tokenizer call lacks."""
    from transformers import PreTrainedTokenizerBase

    known = set(inspect.signature(PreTrainedTokenizerBase.__call__).parameters) - {"self", "text"}
    _refuse_unknown("encode_args", given, known, ("return_tensors", "padding"))


def check_draft_knobs(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a speculation setting that transformers lacks."""
    unknown = sorted(set(given) - set(DRAFT_KNOBS))
    if unknown:
        raise ConfigError(
            f"speculation.extra.{unknown[0]}: is not known to transformers; known: {', '.join(DRAFT_KNOBS)}"
        )


def _refuse_unknown(section: str, given: Mapping[str, Any], known: Collection[str], ours: Collection[str]) -> None:
    for key in given:
        if key in ours:
            raise ConfigError(
                f"runner_args.{section}.{key}: ragspec sets this itself (from `sampling`, and for padding); remove it"
            )
        if key not in known:
            raise ConfigError(f'"runner_args.{section}.{key}" is not known{did_you_mean(key, sorted(known))}')
