"""Every key that a config file of AutoGluon-RAG has ever had, with the sections it was in.

Source: https://github.com/autogluon/autogluon-rag, from May to December 2024 (0.1): its configs, its READMEs and
tutorials, what its code reads. Limit: arguments that it passes on to a library are not listed.
"""

from __future__ import annotations

Names = dict[str, tuple[str, ...]]  # a key of 0.1 -> its other names: older ones, and those that only a README has

PLATFORM_KEYS: dict[str, Names] = {  # of `generator_model_platform_args`; before August 2024, of `generator` itself
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
OLD_SECTIONS = {"misc": "shared", "models": "embedding", "reranker": "retriever"}  # their keys are in these now
UNCLEAR = {
    "model_name",
    "model_platform",
    "platform_args",
    "params",
    "gpu",
    "metadata",
    "max_tokens",
}  # out of sections


def _by_any_name(names: Names) -> dict[str, str]:
    return {name: key for key, others in names.items() for name in (key, *others)}


NAMES = {section: _by_any_name(keys) for section, keys in KEYS.items()}  # section -> any name -> its key of 0.1
PLATFORM_NAMES = {name: key for keys in PLATFORM_KEYS.values() for name, key in _by_any_name(keys).items()}
FLAT = {  # a key outside of any section -> the section it belongs to
    name: section
    for section in ("shared", "vector_db", "generator", "embedding", "retriever", "data")
    for name in NAMES[section]
    if name not in UNCLEAR
} | dict.fromkeys(("num_gpus", "use_bedrock", "bedrock_aws_region", "bedrock_generate_params"), "generator")
