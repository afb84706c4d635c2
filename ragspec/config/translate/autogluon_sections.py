"""Every key that an AutoGluon-RAG config has ever had, and the sections of a config of any age under 0.1's names.

    >>> sections = gather({"retriever": {"top_k_embeddings": 20, "num_gpus": 0}}, Reading("c.yaml"))
    >>> sections["retriever"].take("retriever_top_k"), sections["retriever"].rest()
    (20, ['num_gpus'])

Source: https://github.com/autogluon/autogluon-rag, from May to December 2024 (0.1): its configs, README files,
tutorials, and the keys that its code reads. Limit: arguments that it passes on to a library are not listed.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ragspec.errors import ConfigError, did_you_mean

Names = dict[str, tuple[str, ...]]  # a key of 0.1 -> its other names: older ones, and those found only in a README

PLATFORM_KEYS: dict[str, Names] = {  # in `generator_model_platform_args`; before August 2024, in `generator`
    "huggingface": {
        "hf_model_params": ("generator_hf_model_params",),
        "hf_tokenizer_init_params": ("generator_hf_tokenizer_init_params",),
        "hf_tokenizer_params": ("generator_hf_tokenizer_params",),
        "hf_generate_params": ("generator_hf_generate_params",),
        "hf_forward_params": ("generator_hf_forward_params",),
        "hf_local_model_path": ("local_model_path", "generator_local_model_path"),
    },
    "vllm": {"vllm_init_params": (), "vllm_sampling_params": (), "use_vllm": ("USE_VLLM",)},
    "openai": {"gpt_generate_params": (), "openai_key_file": (), "openai_api_key": ()},
    "bedrock": {"bedrock_generate_params": (), "bedrock_aws_region": (), "use_bedrock": ("USE_BEDROCK",)},
}
RERANKER_KEYS: Names = {
    "use_reranker": ("USE_RERANKER",),
    "reranker_top_k": ("RERANKER_TOP_K",),
    "reranker_model_name": ("RERANKER_MODEL",),
    "reranker_model_platform": ("DEFAULT_RERANKER_MODEL_PLATFORM",),
    "reranker_model_platform_args": (),
    "reranker_batch_size": ("RERANKER_BATCH_SIZE",),
    "reranker_type": ("RERANKER_TYPE",),
    "reranker_hf_model_params": (),
    "reranker_hf_tokenizer_init_params": (),
    "reranker_hf_tokenizer_params": (),
    "reranker_hf_forward_params": (),
    "reranker_num_gpus": (),
}
KEYS: dict[str, Names] = {
    "shared": {
        "pipeline_batch_size": ("PIPELINE_BATCH_SIZE",),
        "max_files_per_batch": ("MAX_FILES_PER_BATCH",),
        "batch_size_calculation_safety_factor": ("safety_factor", "BATCH_SIZE_SAFETY_FACTOR"),
        "num_gpus": (),
        "config_file": (),
        "preset_quality": (),
        "model_ids": (),
    },
    "data": {
        "data_dir": (),
        "file_extns": ("file_exts", "data_file_extns", "SUPPORTED_FILE_EXTENSIONS"),
        "chunk_size": ("CHUNK_SIZE",),
        "chunk_overlap": ("CHUNK_OVERLAP",),
        "web_urls": (),
        "base_urls": (),
        "parse_urls_recursive": ("PARSE_URLS_RECURSIVE",),
        "html_tags_to_extract": ("SUPPORTED_HTML_TAGS",),
        "login_info": (),
        "s3_bucket": ("data_s3_bucket",),
        "HF_DEFAULT_MODEL": (),
        "ST_DEFAULT_MODEL": (),
    },
    "embedding": {
        "embedding_model": ("model_name", "hf_embedding_model", "DEFAULT_EMBEDDING_MODEL"),
        "embedding_model_platform": ("model_platform", "DEFAULT_EMBEDDING_MODEL_PLATFORM"),
        "embedding_model_platform_args": ("platform_args",),
        "pooling_strategy": ("POOLING_STRATEGY",),
        "normalize_embeddings": ("NORMALIZE_EMBEDDINGS",),
        "normalization_params": (),
        "query_instruction_for_retrieval": (),
        "embedding_batch_size": ("EMBEDDING_BATCH_SIZE",),
        "embedding_model_max_tokens": ("max_tokens",),
        "hf_model_params": (),
        "hf_tokenizer_init_params": (),
        "hf_tokenizer_params": ("HF_TOKENIZER_PARAMS",),
        "hf_forward_params": (),
        "use_bedrock": ("embedding_use_bedrock",),
        "bedrock_embedding_params": (),
        "bedrock_generate_params": ("embedding_bedrock_generate_params",),
        "bedrock_aws_region": ("embedding_bedrock_aws_region",),
        "num_gpus": (),
        "st_embedding_model": (),
        "use_sentence_transf": (),
        "reranker_model_platform": (),
    },
    "vector_db": {
        "db_type": ("vector_db_type", "DB_TYPE"),
        "params": ("vector_db_args",),
        "gpu": ("GPU",),
        "similarity_threshold": ("vector_db_sim_threshold", "SIMILARITY_THRESHOLD"),
        "similarity_fn": ("vector_db_sim_fn", "SIMILARITY_FN"),
        "use_existing_vector_db": ("use_existing_vector_db_index", "USE_EXISTING_INDEX"),
        "save_index": ("save_vector_db_index", "SAVE_INDEX"),
        "vector_db_index_save_path": (),
        "vector_db_index_load_path": (),
        "vector_db_index_path": ("INDEX_PATH",),
        "metadata_index_save_path": (),
        "metadata_index_load_path": (),
        "metadata_index_path": ("METADATA_PATH",),
        "metadata": (),
        "s3_bucket": ("vector_db_s3_bucket",),
        "num_gpus": ("vector_db_num_gpus",),
        "faiss_index_type": ("FAISS_INDEX_TYPE",),
        "faiss_index_params": ("FAISS_INDEX_PARAMS",),
        "faiss_search_params": ("FAISS_SEARCH_PARAMS",),
        "faiss_index_nprobe": ("FAISS_NPROBE",),
        "faiss_quantized_index_params": ("FAISS_QUANTIZED_PARAMS",),
        "faiss_clustered_index_params": ("FAISS_CLUSTERED_PARAMS",),
        "milvus_db_name": ("MILVUS_DB_NAME",),
        "milvus_collection_name": ("MILVUS_DB_COLLECTION_NAME",),
        "milvus_search_params": ("MILVUS_SEARCH_PARAMS",),
        "milvus_index_params": ("MILVUS_INDEX_PARAMS",),
        "milvus_create_params": ("MILVUS_CREATE_PARAMS",),
    },
    "retriever": {
        "retriever_top_k": ("top_k_embeddings", "RETRIEVER_TOP_K", "TOP_K"),
        "num_gpus": ("retriever_num_gpus",),
        **RERANKER_KEYS,
    },
    "generator": {
        "generator_model_name": ("GENERATOR_MODEL",),
        "generator_model_platform": ("DEFAULT_GENERATOR_MODEL_PLATFORM",),
        "generator_model_platform_args": (),
        "generator_query_prefix": (),
        "num_gpus": ("generator_num_gpus",),
        "reranker_hf_model_params": (),
        "reranker_hf_tokenizer_params": (),
        "reranker_hf_forward_params": (),
        **{key: names for keys in PLATFORM_KEYS.values() for key, names in keys.items()},
    },
}
OLD_SECTIONS = {"misc": "shared", "models": "embedding", "reranker": "retriever"}  # old section -> today's
UNCLEAR = {  # ambiguous outside of a section
    "model_name",
    "model_platform",
    "platform_args",
    "params",
    "gpu",
    "metadata",
    "max_tokens",
}


def _by_any_name(names: Names) -> dict[str, str]:
    return {name: key for key, others in names.items() for name in (key, *others)}


NAMES = {section: _by_any_name(keys) for section, keys in KEYS.items()}  # section -> any name -> name in 0.1
PLATFORM_NAMES = {name: key for keys in PLATFORM_KEYS.values() for name, key in _by_any_name(keys).items()}
FLAT = {  # a key outside of any section -> its section
    name: section
    for section in ("shared", "vector_db", "generator", "embedding", "retriever", "data")
    for name in NAMES[section]
    if name not in UNCLEAR
} | dict.fromkeys(("num_gpus", "use_bedrock", "bedrock_aws_region", "bedrock_generate_params"), "generator")


# -- reading ---------------------------------------------------------------------------------------

PLATFORM_ARGS = "generator_model_platform_args"
KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
LONGEST = 60  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Reading:
    """The file being read and the needs of the command.

    given: native keys set elsewhere ("model", "retrieval.corpus"), whose counterparts need not work.
    only_retrieval: the command builds or searches an index and needs no generator.
    """

    source: str
    given: frozenset[str] = frozenset()
    only_retrieval: bool = False
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note on something changed or ignored."""
        self.notes.append(f"{self.source}: {text}")

    def error(self, text: str) -> ConfigError:
        """Return a ConfigError that names the file."""
        return ConfigError(f"{self.source}: {text}")


class Setting(NamedTuple):
    """A key as written. where: its prefix, such as "retriever."; key: its name in 0.1."""

    section: str
    where: str
    written: str
    key: str
    value: Any


class Section:
    """One section's settings. `take` removes one; `rest` lists what was not taken and is ignored."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._settings: dict[str, Setting] = {}

    def put(self, setting: Setting) -> Setting | None:
        """Store a setting; return the one already stored under this key if its value differs."""
        kept = self._settings.setdefault(setting.key, setting)
        return None if kept.value == setting.value else kept

    def get(self, key: str) -> Any:
        """Return the value of `key` without removing it; None if it is not set."""
        return self._settings[key].value if key in self._settings else None

    def take(self, key: str, default: Any = None) -> Any:
        """Remove `key` and return its value, `default` if it is not set."""
        return self._settings.pop(key).value if key in self._settings else default

    def take_mapping(self, key: str) -> dict[str, Any]:
        """Remove `key` and return its mapping without nulls, empty if it is not set.

        Raises ConfigError if it is not a mapping.
        """
        written = self._settings[key].written if key in self._settings else key
        mapping = mapping_of(self.take(key), f"{self._source}: {written}")
        return {name: value for name, value in mapping.items() if value is not None}

    def drop(self, keys: Container[str]) -> list[str]:
        """Remove those of `keys` that are set, and return their names as written."""
        return [self._settings.pop(key).written for key in list(self._settings) if key in keys]

    def rest(self) -> list[str]:
        """Return the names, as written, of the settings not taken."""
        return [setting.written for setting in self._settings.values()]


def gather(raw: Mapping[str, Any], reading: Reading) -> dict[str, Section]:
    """Return the settings of `raw` by section, without nulls and ragspec's own keys.

    AutoGluon-RAG reads only sections, so they take precedence over the top level, and current names over older ones. A
    note names each key set twice with different values. Raises ConfigError for unknown keys.
    """
    sections = {name: Section(reading.source) for name in KEYS}
    for setting in _settings(raw, reading.source):
        if setting.value is None:
            continue
        if kept := sections[setting.section].put(setting):
            first = f"{kept.where}{kept.written}"
            reading.note(f"{setting.where}{setting.written}: ignored; {first} is set, and comes first")
    return sections


def _settings(raw: Mapping[str, Any], source: str) -> Iterator[Setting]:
    """Yield a file's settings, those that take precedence first."""
    for name in (*KEYS, *OLD_SECTIONS):
        inner = mapping_of(raw.get(name), f"{source}: {name}")
        if name == "generator":
            yield from _platform_args(inner.pop(PLATFORM_ARGS, None), source)
        yield from _named(inner, OLD_SECTIONS.get(name, name), f"{name}.", source)
    yield from _platform_args(raw.get(PLATFORM_ARGS), source)
    for section in KEYS:
        flat = {key: value for key, value in raw.items() if FLAT.get(key) == section and key != PLATFORM_ARGS}
        yield from _named(flat, section, "", source)


def _platform_args(value: Any, source: str) -> Iterator[Setting]:
    args = mapping_of(value, f"{source}: {PLATFORM_ARGS}")
    return _named(args, "generator", f"{PLATFORM_ARGS}.", source, PLATFORM_NAMES)


def _named(
    inner: dict[str, Any], section: str, where: str, source: str, names: dict[str, str] | None = None
) -> Iterator[Setting]:
    names = names or NAMES[section]
    for written in inner:
        if written not in names:
            lower = [name for name in names if name.islower()]
            hint = did_you_mean(str(written), lower, sorted(set(names.values())))
            raise ConfigError(f"{source}: {where}{written} is not a known key{hint}")
    for written in sorted(inner, key=lambda name: names[name] != name):  # current names first
        yield Setting(section, where, written, names[written], inner[written])


def mapping_of(value: Any, where: str) -> dict[str, Any]:
    """Return a copy of a mapping, empty for null. Raises ConfigError without showing the value."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        kind = KINDS.get(type(value), type(value).__name__)
        raise ConfigError(f"{where}: must contain keys and values, got {kind}")
    return dict(value)


def quoted(value: Any) -> str:
    """Return a value quoted for a message: on one line, shortened."""
    return f'"{" ".join(str(value).split())[:LONGEST]}"'
