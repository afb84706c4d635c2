"""The speculation arguments that vLLM's `LLM(...)` took in 2024, as today's settings.

    >>> modernise({"speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 4})[1]
    {'method': 'prompt_lookup', 'num_tokens': 5, 'ngram_max': 4, 'ngram_min': 1}

They were removed in March 2025 (vLLM 0.8). Limit: `speculative_disable_by_batch_size` has only a rough successor.
"""

from __future__ import annotations

from typing import Any

from ragspec.errors import ConfigError

RENAMED = {  # keys of today's speculative_config with the same meaning
    "speculative_model_quantization": "quantization",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
}
DROPPED = ("speculative_disable_mqa_scorer", "disable_logprobs_during_spec_decoding", "use_v2_block_manager")
NAMES = (
    "speculative_model",
    "num_speculative_tokens",
    "ngram_prompt_lookup_max",
    "ngram_prompt_lookup_min",
    "speculative_disable_by_batch_size",
    "spec_decoding_acceptance_method",
    "typical_acceptance_sampler_posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha",
    *RENAMED,
    *DROPPED,
)
MOST_ROWS = 1024  # end of the batch size range without speculation


def speculates(key: str) -> bool:
    """Return whether an argument of vLLM's is about speculation."""
    return key in NAMES or key == "speculative_config"


def modernise(init: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return (`init` without the old arguments, the equivalent `speculation` section, a note for each argument).

    Raises ConfigError for arguments that would change the answers.
    """
    rest = {key: value for key, value in init.items() if not speculates(key)}
    old = {key: value for key, value in init.items() if key in NAMES and value is not None}
    notes: list[str] = []
    speculation: dict[str, Any] = {"method": "none"}
    extra: dict[str, Any] = {}

    def note(key: str, now: str) -> None:
        notes.append(f"{key}: from vLLM before 0.8, read as {now}")

    _refuse_lossy(old)
    if init.get("speculative_config"):
        return rest, {"method": "speculative_config", "speculative_config": init["speculative_config"]}, notes
    model = old.get("speculative_model")
    if model == "[ngram]":
        # both were required then; today the minimum defaults to 5
        low, high = old.get("ngram_prompt_lookup_min", 1), old.get("ngram_prompt_lookup_max")
        speculation = {"method": "prompt_lookup", "ngram_max": high or max(low, 4), "ngram_min": low}
        note("speculative_model", "speculation.method: prompt_lookup")
        for key in ("ngram_prompt_lookup_max", "ngram_prompt_lookup_min"):
            if key in old:
                note(key, f"speculation.{'ngram_max' if key.endswith('max') else 'ngram_min'}")
    elif model is not None:
        speculation = {"method": "draft_model", "draft_model": model}
        note("speculative_model", "speculation.method: draft_model")
    elif old:
        notes.append(f"{', '.join(old)}: no effect, because there is no speculative_model")
        return rest, speculation, notes
    if (tokens := old.get("num_speculative_tokens")) is not None:
        speculation = {"method": speculation["method"], "num_tokens": tokens} | speculation
        note("num_speculative_tokens", "speculation.num_tokens")
    for then, now in RENAMED.items():
        if then in old:
            extra[now] = old[then]
            note(then, f"speculation.extra.{now}")
    if (rows := old.get("speculative_disable_by_batch_size")) is not None:
        steps = [[1, rows, tokens or 5], [rows + 1, max(MOST_ROWS, rows + 1), 0]]
        speculation["num_tokens_by_batch_size"] = steps
        note("speculative_disable_by_batch_size", f"speculation.num_tokens_by_batch_size: {steps} (approximately)")
    if "spec_decoding_acceptance_method" in old:
        extra["rejection_sample_method"] = "standard"
        note("spec_decoding_acceptance_method", "speculation.extra.rejection_sample_method: standard")
    for key in DROPPED:
        if key in old:
            notes.append(f"{key}: from vLLM before 0.8, dropped: it no longer has any effect")
    return rest, speculation | ({"extra": extra} if extra else {}), notes


def _refuse_lossy(old: dict[str, Any]) -> None:
    method = old.get("spec_decoding_acceptance_method")
    if method == "typical_acceptance_sampler" or any(key.startswith("typical_acceptance") for key in old):
        raise ConfigError(
            "vllm_init_params.spec_decoding_acceptance_method: typical acceptance changes the answers, and vLLM no "
            "longer has it; remove it (rejection_sampler is exact)"
        )
