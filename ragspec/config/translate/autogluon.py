"""AutoGluon-RAG's generator settings, read as they are: `translate(raw, "c.yaml")` -> (native config, notes).

Source: AutoGluon-RAG 0.1, agrag/modules. What ragspec does differently (no prompt in the answer, an attention mask,
real batches) needs no key.
"""

from __future__ import annotations

from typing import Any

from ragspec.config.translate.autogluon_retrieval import SECTIONS, translate_retrieval
from ragspec.config.translate.vllm import modernise
from ragspec.errors import ConfigError, did_you_mean

GENERATOR_KEYS = (
    "generator_model_name",
    "generator_model_platform",
    "generator_model_platform_args",
    "generator_query_prefix",
    "num_gpus",
)
NATIVE_KEYS = ("input", "output", "order", "prompt", "retrieval")  # may appear beside the generator's keys
HUGGINGFACE_KEYS = (
    "hf_model_params",
    "hf_tokenizer_init_params",
    "hf_tokenizer_params",
    "hf_generate_params",
    "hf_local_model_path",
    "local_model_path",
)
VLLM_KEYS = ("vllm_init_params", "vllm_sampling_params")
SAMPLING_KEYS = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")


def is_autogluon(raw: dict[str, Any]) -> bool:
    """Return whether `raw` is an AutoGluon-RAG config: its generator's keys on top or under `generator:`."""
    inner = raw.get("generator")
    keys = [*raw, *(inner if isinstance(inner, dict) else ())]
    return any(isinstance(key, str) and key.startswith("generator_model_") for key in keys)


def translate(raw: dict[str, Any], source: str) -> tuple[dict[str, Any], list[str]]:
    """Return the native config that `raw` means, unchecked, and a note for everything that was not taken over as it is.

    Raises ConfigError for platforms that are not ours and for settings that would change the answers.
    """
    notes: list[str] = []
    generator = _dict(raw, "generator", source)
    for key, value in raw.items():
        if key in GENERATOR_KEYS:
            generator[key] = value
        elif key not in SECTIONS and key != "generator" and key not in NATIVE_KEYS:
            known = [*GENERATOR_KEYS, *NATIVE_KEYS, *SECTIONS]
            raise ConfigError(
                f'{source}: "{key}" is not a known key of an AutoGluon-RAG config{did_you_mean(key, known)}'
            )
    _refuse_unknown(generator, GENERATOR_KEYS, f"{source}: generator.")
    if not generator.get("generator_model_name"):
        raise ConfigError(f"{source}: generator_model_name: missing; give a hub id or a folder")

    config: dict[str, Any] = {key: raw[key] for key in NATIVE_KEYS if key in raw}
    config["model"] = generator["generator_model_name"]
    if generator.get("generator_query_prefix"):
        prompt = _dict(config, "prompt", source)
        config["prompt"] = {"query_prefix": f"{generator['generator_query_prefix']}\n"} | prompt
    if "retrieval" not in config and (
        retrieval := translate_retrieval({name: _dict(raw, name, source) for name in SECTIONS}, source, notes)
    ):
        config["retrieval"] = retrieval
    platform = generator.get("generator_model_platform", "huggingface")
    args = _dict(generator, "generator_model_platform_args", source)
    gpus = generator.get("num_gpus")
    if platform == "huggingface":
        _refuse_unknown(args, HUGGINGFACE_KEYS, f"{source}: generator_model_platform_args.")
        config |= _huggingface(config["model"], args, gpus, source, notes)
    elif platform == "vllm":
        _refuse_unknown(args, VLLM_KEYS, f"{source}: generator_model_platform_args.")
        config |= _vllm(args, gpus, source, notes)
    else:
        raise ConfigError(
            f'{source}: generator_model_platform: "{platform}" is not supported; ragspec runs models itself: '
            "huggingface or vllm"
        )
    return config, notes


def _huggingface(model: str, args: dict[str, Any], gpus: Any, source: str, notes: list[str]) -> dict[str, Any]:
    generate = _dict(args, "hf_generate_params", source)
    if generate.get("assistant_ensemble_weight") is not None:
        raise ConfigError(
            f"{source}: hf_generate_params.assistant_ensemble_weight: changes the answers; remove it "
            "(ragspec's answers are those of plain decoding)"
        )
    tokenizer_call = _dict(args, "hf_tokenizer_params", source)
    for key in ("return_tensors", "padding"):
        if tokenizer_call.pop(key, None) is not None:
            notes.append(f"{source}: hf_tokenizer_params.{key}: dropped; ragspec pads its batches itself")
    model_args = _dict(args, "hf_model_params", source)
    if "torch_dtype" in model_args:
        model_args["dtype"] = model_args.pop("torch_dtype")
    speculation = _huggingface_speculation(generate, source, notes)
    sampling = _sampling(generate, source, notes)
    runner_args = {
        "num_gpus": gpus,
        "model_args": model_args,
        "tokenizer_args": _dict(args, "hf_tokenizer_init_params", source),
        "encode_args": tokenizer_call,
        "generate_args": generate,
    }
    return {
        "model": args.get("hf_local_model_path") or args.get("local_model_path") or model,
        "runner": "huggingface",
        "sampling": sampling,
        "speculation": speculation,
        "runner_args": {key: value for key, value in runner_args.items() if value not in (None, {})},
    }


def _huggingface_speculation(generate: dict[str, Any], source: str, notes: list[str]) -> dict[str, Any]:
    """Take generate()'s speculation arguments out of `generate` and return them as the `speculation` section."""
    out: dict[str, Any] = {"method": "none"}
    lookup = generate.pop("prompt_lookup_num_tokens", None)
    ngram = generate.pop("max_matching_ngram_size", None)
    draft = generate.pop("assistant_model", None)
    draft_tokenizer = generate.pop("assistant_tokenizer", None)
    layer = generate.pop("assistant_early_exit", None)
    if layer is not None:
        out = {"method": "early_exit", "early_exit_layer": layer}
    elif lookup is not None:
        out = {"method": "prompt_lookup", "num_tokens": lookup} | ({"ngram_max": ngram} if ngram else {})
    elif draft is not None:
        out = {"method": "draft_model", "draft_model": draft}
        if draft_tokenizer is not None:
            out["draft_tokenizer"] = draft_tokenizer
    elif draft_tokenizer is not None:
        raise ConfigError(f"{source}: hf_generate_params.assistant_tokenizer: needs assistant_model as well")
    schedule = generate.pop("num_assistant_tokens_schedule", None)
    if schedule == "heuristic":
        schedule = "heuristic_transient"
        notes.append(
            f'{source}: num_assistant_tokens_schedule: "heuristic" carries over from record to record, so '
            'drafts would depend on the order of records; read as "heuristic_transient"'
        )
    knobs = {
        "num_tokens": generate.pop("num_assistant_tokens", None),
        "schedule": schedule,
        "confidence_threshold": generate.pop("assistant_confidence_threshold", None),
        "extra": {k: generate.pop(k) for k in ("assistant_lookbehind", "target_lookbehind") if k in generate} or None,
    }
    return out | {key: value for key, value in knobs.items() if value is not None}


def _sampling(params: dict[str, Any], source: str, notes: list[str]) -> dict[str, Any]:
    """Take generate()'s sampling arguments out of `params` and return them as the `sampling` section."""
    sampling = {key: params.pop(key) for key in SAMPLING_KEYS if key in params}
    if "stop_strings" in params:
        sampling["stop"] = params.pop("stop_strings")
    if (length := params.pop("max_length", None)) is not None and "max_new_tokens" not in sampling:
        sampling["max_new_tokens"] = length
        notes.append(
            f"{source}: max_length: {length} includes the prompt in transformers; read as max_new_tokens: {length}"
        )
    if params.pop("do_sample", False):
        return {"temperature": 1.0, "top_k": 50} | sampling  # generate()'s own defaults
    unused = [key for key in ("temperature", "top_p", "top_k", "min_p") if sampling.pop(key, None) is not None]
    if unused:
        notes.append(f"{source}: {', '.join(unused)}: no effect, because do_sample is not set (greedy decoding)")
    return sampling


def _vllm(args: dict[str, Any], gpus: Any, source: str, notes: list[str]) -> dict[str, Any]:
    init, speculation, said = modernise(_dict(args, "vllm_init_params", source))
    notes += [f"{source}: {line}" for line in said]
    if isinstance(gpus, int) and gpus > 1:
        init.setdefault("tensor_parallel_size", gpus)
    params = _dict(args, "vllm_sampling_params", source)
    if "max_tokens" in params:
        params["max_new_tokens"] = params.pop("max_tokens")
    sampling = {key: params.pop(key) for key in SAMPLING_KEYS if params.get(key) is not None}
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    for key, default in (("temperature", 1.0), ("max_new_tokens", 16)):
        if key not in sampling:
            notes.append(
                f"{source}: vllm_sampling_params: {key} is not set; ragspec's default applies, not vLLM's {default}"
            )
    if params:
        init["sampling_args"] = params
    return {"runner": "vllm", "sampling": sampling, "speculation": speculation, "runner_args": init}


def _refuse_unknown(section: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in section:
        if key not in known:
            raise ConfigError(f"{where}{key} is not a known key{did_you_mean(str(key), known)}")


def _dict(section: dict[str, Any], key: str, source: str) -> dict[str, Any]:
    """Return a copy of the mapping under `key`, empty if there is none."""
    value = section.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: {key}: must contain keys and values, got {value!r}")
    return dict(value)
