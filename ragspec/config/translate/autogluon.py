"""AutoGluon-RAG's config files as ragspec's: `translate(raw, "c.yaml")` -> (native config, notes).

Notes name the keys of other platforms and those without a counterpart (pooling, FAISS, Milvus), one note per section or
platform. What ragspec does differently anyway (no prompt in the answer, an attention mask, real batches) needs no key.
Source: AutoGluon-RAG 0.1 and its history: agrag/modules, its README files, autogluon_sections.py.
Limit: `hf_model_params`, `hf_generate_params` and `vllm_init_params` are checked by the runner, not here.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from ragspec.config.run import RunConfig
from ragspec.config.translate.autogluon_sections import (
    FLAT,
    KEYS,
    NAMES,
    OLD_SECTIONS,
    PLATFORM_KEYS,
    Reading,
    Section,
    gather,
    mapping_of,
    quoted,
)
from ragspec.config.translate.vllm import modernise
from ragspec.errors import ConfigError, did_you_mean

OURS = ("huggingface", "vllm")
SAMPLING_KEYS = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")


def translate_generator(generator: Section, gpus: Any, reading: Reading) -> dict[str, Any]:
    """Return our sections for the generator section. gpus: `num_gpus` of the shared section.

    Raises ConfigError for unsupported platforms and for settings that would change the answers.
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
    """Return the setting that names the platform, and the platform."""
    platform = generator.take("generator_model_platform")
    if platform is not None:
        if not isinstance(platform, str) or platform not in PLATFORM_KEYS:
            hint = did_you_mean(str(platform), OURS)
            raise reading.error(f"generator_model_platform: {quoted(platform)} is not supported{hint}")
        return "generator_model_platform", platform
    # before August 2024 the model's name and two switches decided
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
    """Remove generate()'s speculation arguments from `generate` and return them as the `speculation` section."""
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
    """Remove generate()'s sampling arguments from `params` and return them as the `sampling` section."""
    sampling = {key: params.pop(key) for key in SAMPLING_KEYS if key in params}
    if "stop_strings" in params:
        sampling["stop"] = params.pop("stop_strings")
    if (length := params.pop("max_length", None)) is not None and "max_new_tokens" not in sampling:
        sampling["max_new_tokens"] = length
        reading.note(f"max_length: {length} includes the prompt in transformers; read as max_new_tokens: {length}")
    if params.pop("do_sample", False):
        return {"temperature": 1.0, "top_k": 50} | sampling  # generate()'s defaults
    unused = [key for key in ("temperature", "top_p", "top_k", "min_p") if sampling.pop(key, None) is not None]
    if unused:
        reading.note(f"{', '.join(unused)}: no effect, because do_sample is not set (greedy decoding)")
    return sampling


def _vllm(generator: Section, gpus: Any, reading: Reading) -> dict[str, Any]:
    init, speculation, notes = modernise(generator.take_mapping("vllm_init_params"))
    for note in notes:
        reading.note(note)
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


# -- retrieval -------------------------------------------------------------------------------------

RETRIEVAL = ("data", "embedding", "vector_db", "retriever")
DEFAULT_INDEX = "ragspec_index"
CHARACTERS = 4  # roughly, per token: AutoGluon-RAG counts characters
SHORTEST = 16  # tokens of a passage
CHUNK_SIZE, CHUNK_OVERLAP, TOP_K, RERANKER_TOP_K = 512, 64, 50, 10  # AutoGluon-RAG's defaults
RERANKER = "BAAI/bge-reranker-large"  # AutoGluon-RAG's default
NO_RERANKER = "BAAI/bge-large-en"  # an embedding model that AutoGluon-RAG's own configs name as the reranker
NO_PAGES = (
    "data.web_urls: ragspec fetches no web pages; save them as .html files in data_dir, and if file_extns is set, add "
    "html to it"
)
NO_MODEL = (
    "set it to huggingface, and embedding_model to a sentence-transformers model, or give one to ragspec index with "
    "--embedding-model"
)


def translate_retrieval(sections: Mapping[str, Section], reading: Reading) -> dict[str, Any]:
    """Return our `retrieval` section for the retrieval sections; empty if they name no documents.

    Raises ConfigError for an unsupported search, or, if the index is to be built, for an unsupported corpus.
    """
    wanted = reading.only_retrieval or any(key.startswith("retrieval.") for key in reading.given)
    corpus = _corpus(sections["data"], reading)
    if corpus is None and not wanted:
        note_unused(sections, RETRIEVAL, "without data.data_dir, contexts come with the input records", reading)
        return {}
    search = _search(sections["retriever"], reading)
    if search is None and not wanted:
        note_unused(sections, RETRIEVAL, "", reading)
        return {}
    out: dict[str, Any] = {"index": DEFAULT_INDEX} | ({"corpus": corpus} if corpus else {})
    out |= _passages(sections["data"], reading) | (search or {})
    if model := _embedding_model(sections["embedding"], reading):
        out["embedding_model"] = model
    for name in RETRIEVAL:
        if ignored := sections[name].rest():
            reading.note(f"section {name}: {', '.join(ignored)}: ignored{_instead(name)}")
    if not reading.only_retrieval and "retrieval.index" not in reading.given:
        build = f"ragspec index --config {reading.source}{'' if corpus else ' --corpus FOLDER'}"
        reading.note(f"contexts come from the LanceDB index {DEFAULT_INDEX}; build it with {build}")
    return out


def note_unused(sections: Mapping[str, Section], names: Collection[str], why: str, reading: Reading) -> None:
    """Note each of the sections `names` that has settings left as ignored."""
    for name in names:
        if ignored := sections[name].rest():
            reason = f"; {why}" if why else ""
            reading.note(f"section {name}: ignored ({', '.join(ignored)}){_instead(name)}{reason}")


def _instead(section: str) -> str:
    return "; ragspec reads no FAISS or Milvus: ragspec index builds a LanceDB index" if section == "vector_db" else ""


def _corpus(data: Section, reading: Reading) -> Any:
    """Return where the documents are: None if the file names none, "" if they are on S3."""
    folder = data.take("data_dir") or None
    problems = {}
    if isinstance(folder, str) and (folder.startswith("s3://") or data.get("s3_bucket")):
        folder = ""
        problems["s3_bucket"] = (
            "data.data_dir: ragspec reads no documents from S3; download them (aws s3 sync) and name the folder: "
            f"ragspec index --config {reading.source} --corpus FOLDER"
        )
    if data.get("web_urls"):
        problems["web_urls"] = NO_PAGES
    if problems and "retrieval.corpus" not in reading.given:
        data.drop(problems)
        if reading.only_retrieval and not folder:
            raise reading.error(next(iter(problems.values())))
        for problem in problems.values():
            reading.note(problem)
    return folder


def _search(retriever: Section, reading: Reading) -> dict[str, Any] | None:
    """Return the search settings; None if nothing is searched."""
    found, reranks = retriever.take("retriever_top_k"), retriever.take("use_reranker")
    kept = retriever.take("reranker_top_k", RERANKER_TOP_K) if reranks else None
    if 0 in (found, kept):
        reading.note(f"retriever.{'retriever' if found == 0 else 'reranker'}_top_k: 0: no contexts are retrieved")
        return None
    if found is None:
        found = TOP_K
        reading.note(f"retriever.retriever_top_k: not set; read as AutoGluon-RAG's default, {TOP_K}")
    if not reranks:
        return {"top_k": found}
    model = _reranker(retriever, kept, reading)
    # AutoGluon-RAG's retriever passes that many to the reranker, which keeps reranker_top_k
    return {"candidates": found, "top_k": kept} | ({"reranker_model": model} if model else {})


def _reranker(retriever: Section, kept: Any, reading: Reading) -> Any:
    """Return the reranker; None if the file names none that can rerank, or another one is given."""
    platform, model = retriever.take("reranker_model_platform", "huggingface"), retriever.take("reranker_model_name")
    if "retrieval.reranker_model" in reading.given:
        return None
    if platform != "huggingface":
        raise reading.error(
            f"retriever.reranker_model_platform: {quoted(platform)} is not supported; set it to huggingface, and "
            "reranker_model_name to a sentence-transformers cross-encoder"
        )
    if model is None:
        reading.note(f"retriever.reranker_model_name: not set; read as AutoGluon-RAG's default, {RERANKER}")
        return RERANKER
    if model == NO_RERANKER:
        reading.note(
            f"retriever.reranker_model_name: {model} is an embedding model and cannot rerank: the first {kept} "
            f"passages are kept as found; name a cross-encoder, for instance {RERANKER}"
        )
        return None
    return model


def _passages(data: Section, reading: Reading) -> dict[str, Any]:
    """Return the file types to read and how to split them into passages."""
    types = data.take("file_extns")
    if not types:
        reading.note("data.file_extns: not set; files of all types are read")
    size = _tokens(data, "chunk_size", CHUNK_SIZE, range(SHORTEST, sys.maxsize), reading)
    longest = size // 2 if isinstance(size, int) else sys.maxsize
    overlap = _tokens(data, "chunk_overlap", CHUNK_OVERLAP, range(longest + 1), reading)
    return ({"file_types": types} if types else {}) | {"chunk_size": size, "chunk_overlap": overlap}


def _tokens(data: Section, key: str, default: int, allowed: range, reading: Reading) -> Any:
    """Return a number of characters as tokens, clipped to `allowed`; any other value unchanged."""
    value = data.take(key)
    characters = default if value is None else value
    if type(characters) is not int:
        return value
    tokens = min(max(characters // CHARACTERS, allowed.start), allowed.stop - 1)
    whose = "not set; AutoGluon-RAG's default, " if value is None else ""
    reading.note(f"data.{key}: {whose}{characters} characters, read as {tokens} tokens")
    return tokens


def _embedding_model(embedding: Section, reading: Reading) -> str | None:
    """Return the embedding model; None for keyword search, or if the model is given."""
    written, platform = "embedding_model_platform", embedding.take("embedding_model_platform")
    if platform is None and embedding.take("use_bedrock"):
        written, platform = "use_bedrock", "bedrock"
    model: str | None = embedding.take("embedding_model")
    if "retrieval.embedding_model" in reading.given:
        return None
    if platform in (None, "huggingface"):
        if model is None:
            reading.note("no embedding_model: search is by keyword")
        return model
    problem = f"embedding.{written}: {quoted(platform)} is not supported; {NO_MODEL}"
    if reading.only_retrieval:
        raise reading.error(problem)
    reading.note(problem)
    return None


# -- whole files -----------------------------------------------------------------------------------

SECTION_NAMES = (*KEYS, *OLD_SECTIONS)
NATIVE_KEYS = tuple(RunConfig.model_fields)  # may appear beside AutoGluon-RAG's
SHARED_KEYS = ("input", "output", "order", "prompt", "retrieval")  # native keys that do not show whose file it is
ALSO_NATIVE = ("chunk_size", "chunk_overlap", "embedding_model", "num_gpus")  # also keys of ragspec's sections
WHOLE = ("speculation", "retrieval")  # native sections that replace the translated ones; others merge into them


def is_autogluon(raw: dict[str, Any]) -> bool:
    """Return whether `raw` is an AutoGluon-RAG config: it has one of its keys, or only sections with its names."""
    if any(key in FLAT and key not in ALSO_NATIVE for key in raw):
        return True
    sections = [key for key in SECTION_NAMES if key in raw]
    if any(isinstance(raw[key], dict) and raw[key].keys() & NAMES[OLD_SECTIONS.get(key, key)] for key in sections):
        return True
    return bool(sections) and not any(key in NATIVE_KEYS and key not in SHARED_KEYS for key in raw)


def translate(
    raw: dict[str, Any], source: str, given: Collection[str] = (), *, only_retrieval: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return the native config that `raw` means, unchecked, and notes on what was changed or ignored.

    Args:
        raw: the file's values.
        source: the file's name, for messages.
        given: native keys set elsewhere ("model", "retrieval.corpus"); the file's counterparts need not work.
        only_retrieval: the command needs no generator.

    Raises:
        ConfigError: an unsupported platform, a setting that would change the answers, or an unknown key.
    """
    _refuse_unknown(raw, source)
    ours = {key: raw[key] for key in NATIVE_KEYS if raw.get(key) is not None or (key == "retrieval" and key in raw)}
    reading = Reading(source, frozenset({*given, *ours}), only_retrieval)
    sections = gather(raw, reading)
    gpus = sections["shared"].take("num_gpus")
    config: dict[str, Any] = {}
    if not only_retrieval:
        config = translate_generator(sections["generator"], gpus, reading)
    note_unused(sections, ["shared"], "", reading)
    if "retrieval" in reading.given:
        note_unused(sections, RETRIEVAL, "retrieval is set", reading)
    elif retrieval := translate_retrieval(sections, reading):
        config["retrieval"] = retrieval
    for key, value in ours.items():
        merges = isinstance(config.get(key), dict) and key not in WHOLE
        config[key] = config[key] | mapping_of(value, f"{source}: {key}") if merges else value
    return config, reading.notes


def _refuse_unknown(raw: dict[str, Any], source: str) -> None:
    for key in raw:
        if key not in FLAT and key not in SECTION_NAMES and key not in NATIVE_KEYS:
            known = [*NATIVE_KEYS, *SECTION_NAMES, *(name for name in FLAT if name.islower())]
            hint = did_you_mean(str(key), known, [*SECTION_NAMES, *KEYS["generator"], *NATIVE_KEYS])
            raise ConfigError(f'{source}: "{key}" is not a known key of an AutoGluon-RAG config{hint}')
