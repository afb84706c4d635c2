"""vLLM's configuration from ours: environment variables, the `speculation` section, and checks before weights load.

    >>> speculative_config(SpeculationConfig(method="prompt_lookup"))
    {'method': 'ngram', 'num_speculative_tokens': 8, 'prompt_lookup_min': 2, 'prompt_lookup_max': 4}

Source: vLLM 0.32 and 0.33, config/speculative.py. Limit: what only vLLM can judge is left to its own validation.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any

from ragspec.config.sections import SpeculationConfig
from ragspec.errors import ConfigError, flat
from ragspec.models.resolve import ModelSource, brings_code, weights_bytes
from ragspec.speculation.methods import PLAIN, VLLM, find


def prepare() -> None:
    """Set vLLM's environment before its import: log to stderr, since stdout is for records, and no usage statistics."""
    from ragspec.host.quiet import quiet

    for name, value in {
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": "INFO" if os.environ.get("RAGSPEC_DEBUG") else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy the locks of our threads
        # Plan.own_process decides, and an engine of a CPU's own process needs no more processes for its one device
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }.items():
        os.environ.setdefault(name, value)
    if not os.environ.get("RAGSPEC_DEBUG"):
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    quiet()


def device_count() -> int:
    """Return the number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def one_line(error: Exception) -> str:
    """Return the error's type and message on one line."""
    text = flat(error) or "no message"
    return f"{type(error).__name__}: {text[:400]}"


# -- speculation -----------------------------------------------------------------------------------
# ragspec's method -> vLLM's, where they differ
NAMES = {"prompt_lookup": "ngram"}
PROPOSER = "ragspec.runners.vllm.proposer.Proposer"
EXTENSION = "ragspec.runners.vllm.inside.WorkerExtension"
# of our proposer, if draft lengths are chosen during the run. With 15, a row has up to 16 tokens, and vLLM rounds the
# sizes of its CUDA graphs up to multiples of that: most of them are already
MAX_DRAFT_TOKENS = 15
# vLLM versions tested with our proposer, and how: the custom_class interface is experimental.
TRIED = {
    "0.32": "the whole suite passes (CPU build)",
    "0.33": "the suite passes: its Python on the CPU kernels of 0.32; its CUDA build was configured, not run",
}
GONE = {"medusa": "0.33"}  # vLLM's methods: the version that no longer has it
# draft lengths for `num_tokens: auto`; other methods take theirs from the draft's config, or from vLLM
AUTO_TOKENS = {"prompt_lookup": 8, "draft_model": 4, "eagle": 3, "eagle3": 3}
NGRAM_RANGE = (2, 4)  # vLLM's own default is 5 for both
MODEL_FREE = ("ngram", "ngram_gpu", "suffix", "custom_class")  # for these, `model` in vLLM's config is not a model
DRAFT_TRUST_KEYS = "speculation.draft_trust_remote_code and runner_args.trust_remote_code"  # vLLM has one flag for both


@dataclass(frozen=True, slots=True)
class Additions:
    """What is added to an engine that speculates (inside.py).

    Attributes:
        method: Its name, for notes.
        drafts: Whether our proposer drafts.
        on_cpu: Whether it is vLLM's CPU build.
        pauses: Whether vLLM's own drafts are paused while they lose; None if they are not timed.
    """

    method: str
    drafts: bool
    on_cpu: bool
    pauses: bool | None = None


def is_ours(method: str) -> bool:
    """Return whether our own proposer drafts for this method."""
    row = find(method)
    return row is not None and VLLM in row.drafts_on


def speculative_config(spec: SpeculationConfig, draft_path: str | None = None) -> dict[str, Any] | None:
    """Return the value of `LLM(speculative_config=...)`, None for plain decoding. Raises ConfigError.

    draft_path: resolved path of the draft model, used in place of its name.
    """
    if spec.method == PLAIN:
        return None
    if spec.method == "speculative_config":
        return dict(spec.speculative_config or {})
    if is_ours(spec.method):
        most = spec.draft_tokens or MAX_DRAFT_TOKENS
        return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": most} | spec.extra
    config: dict[str, Any] = {"method": NAMES.get(spec.method, spec.method)}
    tokens = spec.draft_tokens or AUTO_TOKENS.get(spec.method)
    if tokens is None and spec.draft_model:
        tokens = _tokens_of_head(draft_path or spec.draft_model)
    if tokens is not None:
        config["num_speculative_tokens"] = tokens
    if spec.draft_model:
        config["model"] = draft_path or spec.draft_model
    if spec.method == "prompt_lookup":
        low, high = NGRAM_RANGE
        config["prompt_lookup_min"] = spec.ngram_min or min(low, spec.ngram_max or low)
        config["prompt_lookup_max"] = spec.ngram_max or max(high, spec.ngram_min or high)
    if spec.num_tokens_by_batch_size is not None:
        config["num_speculative_tokens_per_batch_size"] = [tuple(step) for step in spec.num_tokens_by_batch_size]
    return config | spec.extra


def _tokens_of_head(path: str) -> int | None:
    """Return how many tokens a draft head proposes per step by its own config, None if that does not say."""
    from transformers import PreTrainedConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(path)
    except (OSError, ValueError):
        return None  # vLLM has the better message for a missing draft
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    block = config.get("block_size") or (config.get("dflash_config") or {}).get("block_size")
    heads = config.get("medusa_num_heads") or config.get("num_heads")
    tokens = proposals[0].get("speculative_tokens") or heads or (block - 1 if block else None)
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def proposer_settings(spec: SpeculationConfig, vocabulary: int | None = None) -> dict[str, Any]:
    """Return the settings that our proposer reads from vLLM's additional_config."""
    drafting = replace(spec.drafting, vocabulary=vocabulary)
    return {"method": spec.method, "num_tokens": spec.draft_tokens, "drafting": asdict(drafting)}


def check_build(config: dict[str, Any] | None, on_cpu: bool, version: str) -> None:
    """Raise ConfigError if this build of vLLM lacks the method of `config`. version: vLLM's."""
    from packaging.version import Version

    method = (config or {}).get("method")
    if method in GONE and Version(version) >= Version(GONE[method]):
        raise ConfigError(
            f"speculation.method: {method}: vLLM removed it in {GONE[method]}, and this is {version}; install an "
            "older one, or use eagle3 or dflash"
        )
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise ConfigError(
            "speculation.method: suffix needs another package: pip install --no-deps arctic-inference==0.1.1 "
            "(building it takes three minutes and a C++ compiler)"
        )
    if on_cpu and method in ("ngram_gpu", "dspark"):
        raise ConfigError(f"speculation.method: {method} needs a GPU; on this machine use prompt_lookup or suffix")


def check_draft_code(config: dict[str, Any] | None, target: str, trust: bool, draft_trust: bool) -> None:
    """Raise ConfigError if vLLM would run the draft's own code although only the target's is trusted.

    vLLM loads both with the target's trust_remote_code (0.33, config/speculative.py). target: the target's path.
    """
    config = config or {}
    name = config.get("model")
    if not trust or draft_trust or not name or name == target or config.get("method") in MODEL_FREE:
        return
    if brings_code(ModelSource(name, name, config.get("revision"))):
        raise ConfigError(
            f'speculation.draft_trust_remote_code: "{name}" brings its own code, and vLLM would run it, as '
            "runner_args.trust_remote_code is true; set both to true if you trust the authors of both, "
            "or choose another draft"
        )


def check_parallel(args: dict[str, Any], config: dict[str, Any] | None, devices: int | None) -> list[str]:
    """Check multi-GPU arguments and return notes. devices: GPUs found, None on a CPU. Raises ConfigError."""
    sizes = {key: int(args.get(key) or 1) for key in ("tensor_parallel_size", "pipeline_parallel_size")}
    wanted = sizes["tensor_parallel_size"] * sizes["pipeline_parallel_size"]
    if devices is not None and wanted > devices:
        shown = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1)
        raise ConfigError(f"runner_args: {shown} needs {wanted} GPUs, this machine has {devices}; lower it")
    if int(args.get("data_parallel_size") or 1) > 1:
        raise ConfigError(
            f"runner_args.data_parallel_size: {args['data_parallel_size']}: one process drives one engine; "
            "use --workers, one for each GPU, or tensor_parallel_size"
        )
    notes = []
    if config:
        own = config.get("draft_tensor_parallel_size")
        if own is not None and own not in (1, sizes["tensor_parallel_size"]):
            raise ConfigError(
                f"speculation.extra.draft_tensor_parallel_size: {own} must be 1 or the target's "
                f"({sizes['tensor_parallel_size']})"
            )
        if sizes["pipeline_parallel_size"] > 1:
            notes.append(
                f"runner_args.pipeline_parallel_size: {sizes['pipeline_parallel_size']}: drafts are made on the last "
                "stage only; tensor_parallel_size combines better with speculation"
            )
    return notes


def check_memory(name: str, path: str, free_bytes: int) -> None:
    """Raise ConfigError if the weights alone exceed the free memory."""
    need = weights_bytes(path)
    if need is not None and need > free_bytes:
        raise ConfigError(
            f'model: "{name}" has {need / 2**30:.1f} GiB of weights, {free_bytes / 2**30:.1f} GiB are free; choose a '
            "smaller or quantised model, or spread it with runner_args.tensor_parallel_size"
        )
