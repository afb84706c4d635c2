"""AutoGluon-RAG's generator -> model, runner, sampling, speculation. Source: its 0.1, agrag/modules/generator.

Limit: what `hf_model_params`, `hf_generate_params` and `vllm_init_params` pass on is checked by the runner, not here.
"""

from __future__ import annotations

from typing import Any

from ragspec.config.translate.autogluon_keys import PLATFORM_KEYS
from ragspec.config.translate.autogluon_sections import Reading, Section, quoted
from ragspec.config.translate.vllm import modernise
from ragspec.errors import did_you_mean

OURS = ("huggingface", "vllm")
SAMPLING_KEYS = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")


def translate_generator(generator: Section, gpus: Any, reading: Reading) -> dict[str, Any]:
    """Return the part of our config that the generator section means. gpus: `num_gpus` of the shared section.

    Raises ConfigError for platforms that are not ours, and for settings that would change the answers.
    """
    name = generator.take("generator_model_name")
    written, platform = _platform(generator, name, reading)
    needed = not reading.given & {"model", "runner"}
    if platform not in OURS:
        problem = f"{written}: {quoted(platform)} is not supported"
        if needed:
            raise reading.error(
                f"{problem}; ragspec runs models itself: set generator_model_platform to huggingface or vllm, and "
                "generator_model_name to a hub id or a folder"
            )
        reading.note(f"{problem}; the model given instead runs with the file's settings for huggingface")
        name, platform = None, "huggingface"
    config: dict[str, Any] = {} if name is None else {"model": name}
    if prefix := generator.take("generator_query_prefix"):
        config["prompt"] = {"query_prefix": f"{prefix}\n"}
    gpus = generator.take("num_gpus", gpus)
    config |= (_vllm if platform == "vllm" else _huggingface)(generator, gpus, reading)
    if needed and not config.get("model"):
        raise reading.error("generator_model_name: missing; give a hub id or a folder, here or with --set model=NAME")
    _note_ignored(generator, platform, reading)
    return config


def _platform(generator: Section, name: Any, reading: Reading) -> tuple[str, str]:
    """Return which setting says what the platform is, and the platform."""
    platform = generator.take("generator_model_platform")
    if platform is not None:
        if not isinstance(platform, str) or platform not in PLATFORM_KEYS:
            hint = did_you_mean(str(platform), OURS)
            raise reading.error(f"generator_model_platform: {quoted(platform)} is not supported{hint}")
        return "generator_model_platform", platform
    # before August 2024, the model's name and two switches said so
    if isinstance(name, str) and "/" not in name and ("gpt-3" in name or "gpt-4" in name):
        return f"generator_model_name: {quoted(name)}", "openai"
    if generator.take("use_bedrock"):
        return "use_bedrock", "bedrock"
    return "use_vllm", "vllm" if generator.take("use_vllm") else "huggingface"


def _note_ignored(generator: Section, platform: str, reading: Reading) -> None:
    for other, keys in PLATFORM_KEYS.items():
        if ignored := generator.drop(keys):
            why = "no effect" if other == platform else f"the platform is {platform}"
            reading.note(f"generator, platform {other}: {', '.join(ignored)}: ignored; {why}")
    if ignored := generator.rest():
        reading.note(f"section generator: {', '.join(ignored)}: ignored")


def _huggingface(generator: Section, gpus: Any, reading: Reading) -> dict[str, Any]:
    generate = generator.take_mapping("hf_generate_params")
    if "assistant_ensemble_weight" in generate:
        raise reading.error(
            "hf_generate_params.assistant_ensemble_weight: changes the answers; remove it "
            "(ragspec's answers are those of plain decoding)"
        )
    tokenizer_call = generator.take_mapping("hf_tokenizer_params")
    for key in ("return_tensors", "padding"):
        if tokenizer_call.pop(key, None) is not None:
            reading.note(f"hf_tokenizer_params.{key}: dropped; ragspec pads its batches itself")
    model_args = generator.take_mapping("hf_model_params")
    if "torch_dtype" in model_args:
        model_args["dtype"] = model_args.pop("torch_dtype")
    speculation = _huggingface_speculation(generate, reading)
    sampling = _sampling(generate, reading)
    runner_args = {
        "num_gpus": gpus,
        "model_args": model_args,
        "tokenizer_args": generator.take_mapping("hf_tokenizer_init_params"),
        "encode_args": tokenizer_call,
        "generate_args": generate,
    }
    local = generator.take("hf_local_model_path")
    return {
        **({"model": local} if local else {}),
        "runner": "huggingface",
        "sampling": sampling,
        "speculation": speculation,
        "runner_args": {key: value for key, value in runner_args.items() if value not in (None, {})},
    }


def _huggingface_speculation(generate: dict[str, Any], reading: Reading) -> dict[str, Any]:
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
        raise reading.error("hf_generate_params.assistant_tokenizer: needs assistant_model as well")
    schedule = generate.pop("num_assistant_tokens_schedule", None)
    if schedule == "heuristic":
        schedule = "heuristic_transient"
        reading.note(
            'num_assistant_tokens_schedule: "heuristic" carries over from record to record, so '
            'drafts would depend on the order of records; read as "heuristic_transient"'
        )
    knobs = {
        "num_tokens": generate.pop("num_assistant_tokens", None),
        "schedule": schedule,
        "confidence_threshold": generate.pop("assistant_confidence_threshold", None),
        "extra": {k: generate.pop(k) for k in ("assistant_lookbehind", "target_lookbehind") if k in generate} or None,
    }
    return out | {key: value for key, value in knobs.items() if value is not None}


def _sampling(params: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """Take generate()'s sampling arguments out of `params` and return them as the `sampling` section."""
    sampling = {key: params.pop(key) for key in SAMPLING_KEYS if key in params}
    if "stop_strings" in params:
        sampling["stop"] = params.pop("stop_strings")
    if (length := params.pop("max_length", None)) is not None and "max_new_tokens" not in sampling:
        sampling["max_new_tokens"] = length
        reading.note(f"max_length: {length} includes the prompt in transformers; read as max_new_tokens: {length}")
    if params.pop("do_sample", False):
        return {"temperature": 1.0, "top_k": 50} | sampling  # generate()'s own defaults
    unused = [key for key in ("temperature", "top_p", "top_k", "min_p") if sampling.pop(key, None) is not None]
    if unused:
        reading.note(f"{', '.join(unused)}: no effect, because do_sample is not set (greedy decoding)")
    return sampling


def _vllm(generator: Section, gpus: Any, reading: Reading) -> dict[str, Any]:
    init, speculation, said = modernise(generator.take_mapping("vllm_init_params"))
    for line in said:
        reading.note(line)
    if isinstance(gpus, int) and gpus > 1:
        init.setdefault("tensor_parallel_size", gpus)
    params = generator.take_mapping("vllm_sampling_params")
    if "max_tokens" in params:
        params["max_new_tokens"] = params.pop("max_tokens")
    sampling = {key: params.pop(key) for key in SAMPLING_KEYS if key in params}
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    for key, default in (("temperature", 1.0), ("max_new_tokens", 16)):
        if key not in sampling:
            reading.note(f"vllm_sampling_params: {key} is not set; ragspec's default applies, not vLLM's {default}")
    if params:
        init["sampling_args"] = params
    return {"runner": "vllm", "sampling": sampling, "speculation": speculation, "runner_args": init}
