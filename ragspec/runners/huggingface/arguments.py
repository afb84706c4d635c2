"""What a config may pass to transformers, which silently accepts most misspelt keys: they are refused here.

And what only its generate() does.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from ragspec.config.sections import SpeculationConfig
from ragspec.errors import ConfigError, did_you_mean
from ragspec.runners.huggingface.args import Args
from ragspec.speculation.methods import PLAIN

OURS = ("max_new_tokens", "max_length", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
DRAFT_KNOBS = ("assistant_lookbehind", "target_lookbehind")


def check_args(args: Args, spec: SpeculationConfig) -> list[str]:
    """Raise ConfigError for arguments that could not work; return notes on those without effect."""
    from ragspec.models.loading import check_device

    check_generate_args(args.generate_args, speculates=spec.method != PLAIN)
    check_encode_args(args.encode_args)
    check_device(args.device)
    check_draft_knobs(spec.extra)
    if spec.num_tokens_by_batch_size is None:
        return []
    return [
        "speculation.num_tokens_by_batch_size: has no effect on runner huggingface (only on vllm); "
        "num_tokens: auto chooses lengths by what pays"
    ]


def only_stock(args: Args, spec: SpeculationConfig) -> str:
    """Return the part of a config that only generate() supports, or ""."""
    from ragspec.models.generation import SERVED

    unserved = next((key for key in args.generate_args if key not in SERVED), "")
    rules = {
        "runner_args.engine: transformers": args.engine == "transformers",
        f"runner_args.generate_args.{unserved}": unserved,
        "runner_args.num_gpus over 1": (args.num_gpus or 0) > 1,
        "runner_args.model_args.device_map": "device_map" in args.model_args,
        "speculation.schedule": spec.schedule != "constant",
        "speculation.confidence_threshold": spec.confidence_threshold is not None,
        "speculation.extra": spec.extra,
    }
    return next((rule for rule, holds in rules.items() if holds), "")


def check_generate_args(given: Mapping[str, Any], *, speculates: bool) -> None:
    """Raise ConfigError for what generate() does not know, what ragspec sets itself, and what changes answers."""
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
    """Raise ConfigError for what a tokenizer's call does not know."""
    from transformers import PreTrainedTokenizerBase

    known = set(inspect.signature(PreTrainedTokenizerBase.__call__).parameters) - {"self", "text"}
    _refuse_unknown("encode_args", given, known, ("return_tensors", "padding"))


def check_draft_knobs(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting of speculation that transformers does not have."""
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
