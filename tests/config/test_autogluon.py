import re
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel

from ragspec import runners
from ragspec.config.load import build_config, config_of, load_config, load_retrieval
from ragspec.config.run import RunConfig
from ragspec.config.translate.autogluon import ALSO_NATIVE, is_autogluon, translate
from ragspec.config.translate.autogluon_sections import FLAT, NAMES, OLD_SECTIONS, PLATFORM_NAMES
from ragspec.config.translate.vllm import modernise
from ragspec.errors import ConfigError
from tests.conftest import ROOT


def resolved(name):
    config, notes = load_config(str(ROOT / "sample_configs" / name))
    return config.model_dump(exclude_defaults=True), notes


def test_tutorial_configuration_1_is_a_draft_model():
    config, notes = resolved("autogluon_draft_model.yaml")
    assert config == {
        "model": "meta-llama/Llama-3.1-8B",
        "runner": "huggingface",
        "speculation": {"method": "draft_model", "draft_model": "meta-llama/Llama-3.2-1B"},
    }
    assert notes == []


def test_tutorial_configuration_2_is_universal_assisted_decoding():
    config, notes = resolved("autogluon_universal.yaml")
    assert config == {
        "model": "google/gemma-2-9b",
        "runner": "huggingface",
        "speculation": {
            "method": "draft_model",
            "draft_model": "double7/vicuna-68m",
            "draft_tokenizer": "double7/vicuna-68m",
        },
    }
    assert notes == []


def test_tutorial_configuration_3_is_vllm_with_a_draft_model():
    config, notes = resolved("autogluon_vllm.yaml")
    assert config == {
        "model": "facebook/opt-6.7b",
        "runner": "vllm",
        "speculation": {"method": "draft_model", "draft_model": "facebook/opt-125m", "num_tokens": 5},
    }
    assert any("speculative_model: from vLLM before 0.8" in note for note in notes)
    assert any("num_speculative_tokens: from vLLM before 0.8" in note for note in notes)


FULL = {
    "shared": {"pipeline_batch_size": 20},
    "data": {"chunk_size": 512},
    "retriever": {"retriever_top_k": 10},
    "generator": {
        "generator_model_name": "some/model",
        "generator_model_platform": "huggingface",
        "generator_model_platform_args": {
            "hf_model_params": {"torch_dtype": "float16", "attn_implementation": "sdpa"},
            "hf_tokenizer_init_params": {"padding_side": "left"},
            "hf_tokenizer_params": {"return_tensors": "pt", "truncation": True, "max_length": 900},
            "hf_generate_params": {
                "max_new_tokens": 64,
                "do_sample": True,
                "temperature": 0.7,
                "length_penalty": 1.5,
                "assistant_model": "some/draft",
                "num_assistant_tokens": 7,
                "num_assistant_tokens_schedule": "heuristic",
                "assistant_confidence_threshold": 0.3,
            },
            "hf_local_model_path": "/models/here",
        },
        "generator_query_prefix": "Answer briefly.",
        "num_gpus": 1,
    },
}


def test_every_sub_dictionary_of_the_huggingface_platform_is_honoured():
    raw, notes = translate(FULL, "c.yaml")
    config = build_config(raw)
    assert config.model == "/models/here"
    assert config.prompt.query_prefix == "Answer briefly.\n"
    assert config.sampling.model_dump(exclude_defaults=True) == {"max_new_tokens": 64, "temperature": 0.7, "top_k": 50}
    assert config.runner_args == {
        "num_gpus": 1,
        "model_args": {"dtype": "float16", "attn_implementation": "sdpa"},
        "tokenizer_args": {"padding_side": "left"},
        "encode_args": {"truncation": True, "max_length": 900},
        "generate_args": {"length_penalty": 1.5},
    }
    assert config.speculation.model_dump(exclude_defaults=True) == {
        "method": "draft_model",
        "draft_model": "some/draft",
        "num_tokens": 7,
        "schedule": "heuristic_transient",
        "confidence_threshold": 0.3,
    }
    said = "\n".join(notes)
    assert all(f"section {name}: ignored" in said for name in ("shared", "data", "retriever"))  # no data_dir
    assert "return_tensors: dropped" in said
    assert "heuristic" in said


def huggingface(**generate):
    args = {"hf_generate_params": generate}
    return translate({"generator_model_name": "m", "generator_model_platform_args": args}, "c.yaml")


def test_without_do_sample_a_temperature_is_without_effect_and_said_to_be():
    raw, notes = huggingface(temperature=0.9, top_p=0.5)
    assert raw["sampling"] == {}
    assert "temperature, top_p: no effect" in notes[0]


def test_prompt_lookup_and_early_exit_are_read_from_generate_params():
    assert huggingface(prompt_lookup_num_tokens=6, max_matching_ngram_size=3)[0]["speculation"] == {
        "method": "prompt_lookup",
        "num_tokens": 6,
        "ngram_max": 3,
    }
    assert huggingface(assistant_early_exit=4)[0]["speculation"] == {"method": "early_exit", "early_exit_layer": 4}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"generator_model_name": "m", "generator_model_platform": "bedrock"}, '"bedrock" is not supported'),
        ({"generator_model_platform": "vllm"}, "generator_model_name: missing"),
        ({"generator_model_name": "m", "generator_model_platfrom": "vllm"}, 'did you mean "generator_model_platform"'),
        (
            {"generator_model_name": "m", "generator_model_platform_args": {"hf_params": {}}},
            "hf_params is not a known key",
        ),
        ({"generator_model_name": "m", "generator_model_platform_args": [1]}, "must contain keys and values"),
    ],
)
def test_what_is_not_ours_is_a_clear_error(raw, message):
    with pytest.raises(ConfigError, match=message):
        translate(raw, "c.yaml")


def test_an_ensemble_weight_changes_answers_and_is_refused():
    with pytest.raises(ConfigError, match="assistant_ensemble_weight: changes the answers"):
        huggingface(assistant_model="d", assistant_ensemble_weight=0.5)


def test_vllm_sampling_and_gpus_are_translated():
    args = {"vllm_sampling_params": {"max_tokens": 30, "temperature": 0.5, "top_k": -1, "presence_penalty": 0.1}}
    raw, notes = translate(
        {
            "generator_model_name": "m",
            "generator_model_platform": "vllm",
            "generator_model_platform_args": args,
            "num_gpus": 2,
        },
        "c.yaml",
    )
    assert raw["sampling"] == {"max_new_tokens": 30, "temperature": 0.5, "top_k": 0}
    assert raw["runner_args"] == {"tensor_parallel_size": 2, "sampling_args": {"presence_penalty": 0.1}}
    assert notes == []


@pytest.mark.parametrize(
    ("old", "speculation"),
    [
        ({"speculative_model": "d"}, {"method": "draft_model", "draft_model": "d"}),
        (
            {"speculative_model": "[ngram]", "num_speculative_tokens": 4, "ngram_prompt_lookup_max": 3},
            {"method": "prompt_lookup", "num_tokens": 4, "ngram_max": 3, "ngram_min": 1},
        ),
        (
            {"speculative_model": "d", "speculative_model_quantization": "fp8", "speculative_max_model_len": 512},
            {"method": "draft_model", "draft_model": "d", "extra": {"quantization": "fp8", "max_model_len": 512}},
        ),
        (
            {"speculative_model": "d", "num_speculative_tokens": 3, "speculative_disable_by_batch_size": 8},
            {
                "method": "draft_model",
                "draft_model": "d",
                "num_tokens": 3,
                "num_tokens_by_batch_size": [[1, 8, 3], [9, 1024, 0]],
            },
        ),
        (
            {"speculative_model": "d", "spec_decoding_acceptance_method": "rejection_sampler"},
            {"method": "draft_model", "draft_model": "d", "extra": {"rejection_sample_method": "standard"}},
        ),
        ({"num_speculative_tokens": 3}, {"method": "none"}),
    ],
)
def test_arguments_of_2024_have_todays_meaning_and_a_note_each(old, speculation):
    rest, now, notes = modernise({"max_model_len": 99, **old})
    assert rest == {"max_model_len": 99}
    assert now == speculation
    assert all(any(key in note for note in notes) for key in old)


def test_dropped_arguments_are_named():
    notes = modernise({"speculative_model": "d", "use_v2_block_manager": True})[2]
    assert any("use_v2_block_manager" in note and "dropped" in note for note in notes)


def test_typical_acceptance_is_refused():
    with pytest.raises(ConfigError, match="typical acceptance changes the answers"):
        modernise({"speculative_model": "d", "spec_decoding_acceptance_method": "typical_acceptance_sampler"})


RETRIEVING = {
    "generator": {"generator_model_name": "m"},
    "data": {
        "data_dir": "docs/",
        "file_extns": [".md", ".pdf"],
        "chunk_size": 256,
        "chunk_overlap": 32,
        "web_urls": [],
    },
    "embedding": {"embedding_model": "BAAI/bge-small-en", "normalize_embeddings": True},
    "vector_db": {"db_type": "faiss"},
    "retriever": {"retriever_top_k": 20, "use_reranker": False, "reranker_model_name": "BAAI/bge-reranker-base"},
}


def test_the_retrieval_sections_become_ours():
    raw, notes = translate(RETRIEVING, "c.yaml")
    assert raw["retrieval"] == {
        "index": "ragspec_index",
        "corpus": "docs/",
        "file_types": [".md", ".pdf"],
        "chunk_size": 64,  # there, characters
        "chunk_overlap": 8,
        "embedding_model": "BAAI/bge-small-en",
        "top_k": 20,
    }
    assert build_config(raw).retrieval.corpus == ["docs/"]
    said = "\n".join(notes)
    assert "section data: web_urls: ignored" in said
    assert "section vector_db: db_type: ignored" in said
    assert "ragspec index --config c.yaml" in said


def test_a_reranker_takes_what_the_retriever_found():
    raw, _ = translate(
        RETRIEVING | {"retriever": {"use_reranker": True, "reranker_model_name": "r", "reranker_top_k": 3}}, "c"
    )
    assert raw["retrieval"]["reranker_model"] == "r"
    assert (raw["retrieval"]["candidates"], raw["retrieval"]["top_k"]) == (50, 3)
    raw, notes = translate(RETRIEVING | {"retriever": {"use_reranker": True}}, "c")
    assert raw["retrieval"]["reranker_model"] == "BAAI/bge-reranker-large"
    assert any("reranker_model_name: not set; read as AutoGluon-RAG's default" in note for note in notes)


def test_an_embedding_model_is_not_taken_for_a_reranker():
    """AutoGluon-RAG's own configs name one; as a cross-encoder it would have random weights."""
    reranker = {"use_reranker": True, "reranker_model_name": "BAAI/bge-large-en", "reranker_top_k": 3}
    raw, notes = translate(RETRIEVING | {"retriever": reranker}, "c")
    assert "reranker_model" not in raw["retrieval"]
    assert raw["retrieval"]["top_k"] == 3
    assert any("BAAI/bge-large-en is an embedding model and cannot rerank" in note for note in notes)


HISTORY = {  # AutoGluon-RAG's configs from May to December 2024, by what is in them
    "defaults of May": "data: {chunk_size: 512, chunk_overlap: 128}",
    "defaults in capitals": "data: {CHUNK_SIZE: 512, CHUNK_OVERLAP: 64}",
    "default models of two libraries": "data: {HF_DEFAULT_MODEL: m/a, ST_DEFAULT_MODEL: m/b}",
    "section models": "models: {DEFAULT_EMBEDDING_MODEL: m/a, POOLING_STRATEGY: None, NORMALIZE_EMBEDDINGS: false}",
    "defaults of data": """
CHUNK_SIZE: 512
CHUNK_OVERLAP: 64
PARSE_URLS_RECURSIVE: true
SUPPORTED_FILE_EXTENSIONS: [.pdf, .txt, .docx, .doc, .rtf, .csv, .md, .py, .log]
SUPPORTED_HTML_TAGS: [p, table]
""",
    "defaults of embedding": """
DEFAULT_EMBEDDING_MODEL: m/a
DEFAULT_EMBEDDING_MODEL_PLATFORM: huggingface
POOLING_STRATEGY: null
NORMALIZE_EMBEDDINGS: false
HF_TOKENIZER_PARAMS: {truncation: true}
EMBEDDING_BATCH_SIZE: 128
""",
    "defaults of vector_db": """
DB_TYPE: faiss
GPU: false
SIMILARITY_THRESHOLD: 0.95
SIMILARITY_FN: cosine
USE_EXISTING_INDEX: false
SAVE_INDEX: false
INDEX_PATH: a/
METADATA_PATH: b/
FAISS_INDEX_TYPE: IndexFlatL2
FAISS_NPROBE: 5
FAISS_QUANTIZED_PARAMS: {nlist: 3, m: 4, bits: 4}
FAISS_CLUSTERED_PARAMS: {nlist: 3}
FAISS_INDEX_PARAMS: {quantizer: IndexFlatL2, nlist: 3}
FAISS_SEARCH_PARAMS: {nprobe: 5}
MILVUS_DB_NAME: a.db
MILVUS_DB_NAME: b/a.db
MILVUS_DB_COLLECTION_NAME: c
MILVUS_INDEX_PARAMS: {metric_type: L2, params: {nlist: 256}}
MILVUS_SEARCH_PARAMS: {metric_type: L2}
MILVUS_CREATE_PARAMS: {metric_type: L2}
""",
    "defaults of retriever": """
TOP_K: 5
RETRIEVER_TOP_K: 50
RERANKER_TOP_K: 10
RERANKER_MODEL: m/r
DEFAULT_RERANKER_MODEL_PLATFORM: huggingface
RERANKER_BATCH_SIZE: 64
RERANKER_TYPE: flag_embedding
USE_RERANKER: false
""",
    "defaults of generator": "DEFAULT_GENERATOR_MODEL_PLATFORM: huggingface",
    "defaults of shared": "PIPELINE_BATCH_SIZE: 20\nMAX_FILES_PER_BATCH: 100\nBATCH_SIZE_SAFETY_FACTOR: 0.5",
    "example of June, with a bucket": """
data: {chunk_size: 128, chunk_overlap: 16, s3_bucket: b, data_dir: docs/}
embedding: {embedding_model: m/a, hf_model_params: null, hf_forward_params: null, hf_tokenizer_init_params: null}
vector_db: {db_type: faiss, params: {gpu: false}, s3_bucket: b, vector_db_index_path: i, metadata_index_path: j}
""",
    "example of June, with section misc": """
misc: {num_gpus: 0}
data: {data_dir: docs/, file_extns: [pdf, txt]}
retriever: {top_k_embeddings: 4, use_reranker: true, reranker_type: flag_embedding, reranker_model_name: m/r}
generator: {generator_model_name: mistral.mistral-7b-instruct-v0:2, use_bedrock: true, openai_key_file: key.txt}
""",
    "example of July, in Bedrock": """
data: {chunk_size: 128, chunk_overlap: 16, data_dir: "s3://b/docs/", file_extns: [pdf, txt]}
embedding: {embedding_model: m/a, pooling_strategy: cls, normalization_params: {p: 2, dim: 1, eps: 1e-12}}
vector_db: {db_type: milvus, use_existing_vector_db: true, vector_db_index_load_path: i, metadata_index_load_path: j}
retriever:
  retriever_top_k: 20
  use_reranker: true
  reranker_model_name: BAAI/bge-large-en
  reranker_hf_tokenizer_params: {padding: true, max_length: 512, return_tensors: pt}
generator:
  generator_model_name: mistral.mistral-7b-instruct-v0:2
  use_bedrock: true
  bedrock_generate_params: {max_tokens: 512}
  openai_key_file: /home/me/openai.txt
  generator_hf_generate_params: {max_new_tokens: 1024}
  generator_query_prefix: You are a helpful chat assistant.
""",
    "example of June, in OpenAI": """
generator: {generator_model_name: gpt-3.5-turbo, openai_key_file: key.txt, gpt_generate_params: {max_tokens: 5}}
""",
    "example with a key that is there twice": """
vector_db:
  save_index: true
  vector_db_index_save_path: i
  metadata_index_save_path: j
  vector_db_index_save_path: i
""",
    "config of the code": "data: {data_dir: src/, file_extns: [py]}\nretriever: {top_k_embeddings: 20, num_gpus: 0}",
    "flat config of July": """
data_dir: docs
data_file_extns: [txt]
chunk_size: 512
hf_embedding_model: m/a
hf_tokenizer_params: {padding: true}
vector_db_type: faiss
vector_db_args: {gpu: false}
vector_db_sim_threshold: 0.95
vector_db_sim_fn: cosine
vector_db_s3_bucket: b
vector_db_num_gpus: 0
use_existing_vector_db_index: false
save_index: true
retriever_top_k: 10
retriever_num_gpus: 0
reranker_model_name: m/r
reranker_num_gpus: 0
generator_hf_model_params: {torch_dtype: float16}
generator_num_gpus: 0
generator_local_model_path: null
use_vllm: false
""",
    "preset of July": "misc: {pipeline_batch_size: 10}\nembedding: {num_gpus: 4}\nretriever: {num_gpus: 4}",
    "preset of July, with batches": """
shared: {pipeline_batch_size: 20, batch_size_calculation_safety_factor: 0.5, max_files_per_batch: 100}
embedding: {embedding_model: cohere.embed-english-v3, use_bedrock: true, bedrock_aws_region: us-west-2}
generator: {generator_model_name: anthropic.claude, use_bedrock: true, bedrock_aws_region: us-west-2}
""",
    "preset of December": """
shared: {pipeline_batch_size: 20}
data: {chunk_size: 128, chunk_overlap: 16, file_extns: [pdf, txt]}
embedding:
  embedding_model: cohere.embed-english-v3
  embedding_model_platform: bedrock
  embedding_model_platform_args: {bedrock_aws_region: us-west-2, hf_tokenizer_params: {padding: true}}
vector_db: {db_type: faiss, save_index: true, vector_db_index_save_path: i, metadata_index_save_path: j}
retriever:
  retriever_top_k: 20
  use_reranker: true
  reranker_model_name: BAAI/bge-large-en
  reranker_model_platform: huggingface
  reranker_model_platform_args: {hf_tokenizer_params: {max_length: 512, return_tensors: pt}}
generator:
  generator_model_name: anthropic.claude-3-sonnet-20240229-v1:0
  generator_model_platform: bedrock
  generator_model_platform_args:
    bedrock_aws_region: us-west-2
    bedrock_generate_params: {max_tokens: 1024, anthropic_version: bedrock-2023-05-31}
    hf_generate_params: {max_new_tokens: 1024}
""",
    "reranker's own section": "reranker: {reranker_model_platform: huggingface, reranker_model_platform_args: {}}",
    "README of the embedding module": "embedding: {model_name: m/a, model_platform: huggingface, platform_args: {}}",
    "README of the data module": """
data:
  data_dir: docs
  file_exts: [.txt]
  web_urls: ["https://example.org/"]
  base_urls: ["https://example.org/"]
  parse_urls_recursive: true
  html_tags_to_extract: [p]
  login_info: {"https://example.org/": {login_url: u, credentials: {username: me, password: letmein9}}}
""",
    "README of the generator module": """
generator:
  generator_model_name: m/g
  generator_model_platform: huggingface
  generator_model_platform_args: {hf_forward_params: {}, local_model_path: /models/g, openai_key_file: key.txt}
""",
    "tutorial on FAISS": """
vector_db:
  db_type: faiss
  faiss_index_type: IndexIVFPQ
  faiss_quantized_index_params: {nlist: 50, m: 8, bits: 8}
  faiss_clustered_index_params: {nlist: 50}
  faiss_index_nprobe: 15
""",
    "tutorial on the generator alone": "retriever: {retriever_top_k: 20}",
    "tutorial on the reranker": """
retriever:
  use_reranker: true
  reranker_model_name: BAAI/bge-large-en
  reranker_model_platform: huggingface
  reranker_model_platform_args: null
""",
    "tutorial on tokens": """
embedding:
  embedding_model: cohere.embed-english-v3
  embedding_model_platform: bedrock
  embedding_model_platform_args: {bedrock_aws_region: us-west-2, max_tokens: 8192}
""",
    "tutorial on speculative decoding": """
generator_model_name: m/g
generator_model_platform: vllm
generator_model_platform_args: {vllm_init_params: {speculative_model: m/d, num_speculative_tokens: 5}}
""",
    "sections without anything": "shared:\ndata:\nembedding:\nvector_db:\nretriever:\ngenerator:\n",
    "one empty section": "generator:\n",
}
CASES = pytest.mark.parametrize("text", HISTORY.values(), ids=[name.replace(" ", "-") for name in HISTORY])


@CASES
def test_every_config_of_its_history_answers_with_a_model_of_ones_own(text, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    config, _ = load_config(str(path), ["model=demo", "runner=auto", "speculation=null"])
    assert config.model == "demo"


@CASES
def test_every_config_of_its_history_can_be_searched_and_indexed(text, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert load_retrieval(str(path), [], {}, builds=False)[0].index == "ragspec_index"
    given = {"corpus": ["docs"], "embedding_model": "demo"}
    config, _ = load_retrieval(str(path), [], given)
    assert (config.corpus, config.embedding_model) == (["docs"], "demo")


@CASES
def test_notes_are_one_line_for_each_section_or_platform(text, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    _, notes = load_config(str(path), ["model=demo", "speculation=null"])
    ignored = [note for note in notes if "ignored" in note]
    heads = [note.partition(": ")[2].split(":")[0] for note in ignored]
    assert len(set(heads)) == len(heads)
    assert all("\n" not in note for note in notes)


VALUES = {  # of keys that are checked; any other can be a mapping
    **dict.fromkeys(("chunk_size", "chunk_overlap"), 400),
    **dict.fromkeys(("retriever_top_k", "reranker_top_k", "num_gpus"), 2),
    **dict.fromkeys(("embedding_model", "reranker_model_name", "generator_model_name", "hf_local_model_path"), "m/x"),
    **dict.fromkeys(("embedding_model_platform", "reranker_model_platform"), "huggingface"),
    **dict.fromkeys(("use_vllm", "use_bedrock", "use_reranker"), False),
    "generator_model_platform": "vllm",
    "generator_model_platform_args": {"hf_generate_params": {"max_new_tokens": 3}},
    "data_dir": "docs",
    "web_urls": ["https://example.org"],
    "file_extns": ["txt"],
    "generator_query_prefix": "Answer.",
}
SWITCHES = ("use_vllm", "use_bedrock", "use_reranker", "embedding_model_platform", "reranker_model_platform")
EVERY_KEY = [
    *((name, written, key) for name in NAMES for written, key in NAMES[name].items()),
    *((old, written, key) for old, name in OLD_SECTIONS.items() for written, key in NAMES[name].items()),
    *(("generator_model_platform_args", written, key) for written, key in PLATFORM_NAMES.items()),
    *(("", written, NAMES[name][written]) for written, name in FLAT.items()),
]


@pytest.mark.parametrize(("section", "written", "key"), EVERY_KEY)
def test_no_key_that_it_ever_had_is_refused_or_dropped_without_a_word(section, written, key):
    value = VALUES.get(key, {"a": 1} if key not in PLATFORM_NAMES.values() else {})
    setting = {section: {written: value}} if section else {written: value}
    base = {"data": {"data_dir": "here"}, "retriever": {"use_reranker": True, "reranker_top_k": 9}}
    if section in ("data", "retriever"):
        setting = {section: base[section] | setting[section]}
    before, said = translate(base, "c", {"model"})
    after, notes = translate(base | setting, "c", {"model"})
    told = any(written in note for note in set(notes) - set(said))
    assert told or after != before or key in SWITCHES or not value


READ = {  # section -> what its code has ever read there
    "data": "base_urls chunk_overlap chunk_size data_dir file_extns html_tags_to_extract login_info s3_bucket web_urls "
    "parse_urls_recursive",
    "embedding": "embedding_batch_size embedding_model embedding_model_max_tokens embedding_model_platform use_bedrock "
    "embedding_model_platform_args hf_forward_params hf_model_params hf_tokenizer_params normalization_params "
    "normalize_embeddings pooling_strategy query_instruction_for_retrieval bedrock_aws_region bedrock_embedding_params "
    "bedrock_generate_params reranker_model_platform",
    "generator": "bedrock_aws_region bedrock_generate_params generator_hf_forward_params generator_hf_generate_params "
    "generator_hf_model_params generator_hf_tokenizer_params generator_model_name generator_model_platform num_gpus "
    "generator_model_platform_args generator_query_prefix gpt_generate_params local_model_path openai_key_file "
    "reranker_hf_forward_params reranker_hf_model_params reranker_hf_tokenizer_params use_bedrock use_vllm "
    "vllm_sampling_params",
    "generator_model_platform_args": "bedrock_aws_region bedrock_generate_params gpt_generate_params openai_api_key "
    "hf_generate_params hf_local_model_path hf_model_params hf_tokenizer_init_params hf_tokenizer_params "
    "vllm_init_params vllm_sampling_params",
    "misc": "num_gpus pipeline_batch_size",
    "reranker": "reranker_model_platform reranker_model_platform_args",
    "retriever": "num_gpus reranker_batch_size reranker_hf_forward_params reranker_hf_model_params reranker_top_k "
    "reranker_hf_tokenizer_params reranker_model_name reranker_model_platform reranker_model_platform_args "
    "reranker_type retriever_top_k top_k_embeddings use_reranker",
    "shared": "batch_size_calculation_safety_factor max_files_per_batch pipeline_batch_size",
    "vector_db": "db_type faiss_clustered_index_params faiss_index_nprobe faiss_index_params faiss_index_type "
    "faiss_quantized_index_params faiss_search_params metadata_index_load_path metadata_index_path params s3_bucket "
    "metadata_index_save_path milvus_collection_name milvus_create_params milvus_db_name milvus_index_params num_gpus "
    "milvus_search_params save_index similarity_fn similarity_threshold use_existing_vector_db "
    "vector_db_index_load_path vector_db_index_path vector_db_index_save_path",
}


def test_every_key_that_its_code_has_read_is_known():
    known = {(section, written) for section, written, _ in EVERY_KEY}
    assert {(section, key) for section, keys in READ.items() for key in keys.split()} - known == set()


def test_the_page_on_migrating_names_every_key():
    page = (ROOT / "docs" / "guide" / "migrating.md").read_text()
    names = {written for _, written, _ in EVERY_KEY if written.islower()} | NAMES.keys() | OLD_SECTIONS.keys()
    assert {name for name in names if not re.search(rf"\b{name}\b", page)} == set()


@pytest.mark.parametrize(("section", "written"), [(section, written) for section, written, _ in EVERY_KEY])
def test_a_null_is_as_if_the_key_were_not_there(section, written):
    raw = {section: {written: None}} if section else {written: None}
    assert config_of({"generator": None, **raw}, "c", ["model=demo"]) == config_of(
        {"generator": None}, "c", ["model=demo"]
    )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"data": {"chunk_sise": 3}}, 'data.chunk_sise is not a known key; did you mean "chunk_size"'),
        ({"embedding": {"embeding_model": "m"}}, 'did you mean "embedding_model"'),
        ({"vector_db": {"faiss_index_typ": 1}}, 'did you mean "faiss_index_type"'),
        ({"retriever": {"retriever_topk": 1}}, 'did you mean "retriever_top_k"'),
        ({"retriever": {"top_k_embedding": 1}}, 'did you mean "top_k_embeddings"'),
        ({"generator": {"generator_model_nam": "m"}}, 'did you mean "generator_model_name"'),
        ({"generator": {"generator_model_platform_args": {"hf_generate_param": {}}}}, 'mean "hf_generate_params"'),
        ({"misc": {"pipeline_batch": 1}}, 'did you mean "pipeline_batch_size"'),
        ({"generator": None, "embeding": {}}, '"embeding" is not a known key of an AutoGluon-RAG config; did you mean'),
        ({"retriever": {1: 2}}, "retriever.1 is not a known key"),
        ({"data": {"data_dir": "d"}, "colour": "red"}, '"colour" is not a known key'),
        ({"generator_model_platform": "vlm", "generator_model_name": "m"}, 'did you mean "vllm"'),
    ],
)
def test_a_misspelt_key_is_an_error_that_names_the_nearest(raw, message):
    assert is_autogluon(raw)
    with pytest.raises(ConfigError, match=message):
        config_of(raw, "c.yaml", ["model=demo"])


def test_keys_of_other_platforms_are_named_in_a_note_for_each_platform():
    args = {
        "hf_generate_params": {"max_new_tokens": 12},
        "bedrock_aws_region": "us-west-2",
        "bedrock_generate_params": {"max_tokens": 64},
        "gpt_generate_params": {},
        "openai_key_file": "key.txt",
        "vllm_init_params": {"dtype": "half"},
    }
    generator = {"generator_model_name": "m", "generator_model_platform_args": args}
    config, notes = config_of({"generator": generator}, "c.yaml")
    assert config.sampling.max_new_tokens == 12
    ignored = {
        "bedrock": "bedrock_aws_region, bedrock_generate_params",
        "openai": "gpt_generate_params, openai_key_file",
        "vllm": "vllm_init_params",
    }
    assert sorted(notes) == [
        f"c.yaml: generator, platform {platform}: {keys}: ignored; the platform is huggingface"
        for platform, keys in ignored.items()
    ]


@pytest.mark.parametrize("old", [False, True])
def test_older_keys_of_the_generator_mean_what_todays_mean(old):
    params = {
        "hf_model_params": {"torch_dtype": "float16"},
        "hf_tokenizer_init_params": {"padding_side": "left"},
        "hf_tokenizer_params": {"truncation": True},
        "hf_generate_params": {"max_new_tokens": 7, "assistant_model": "d"},
        "hf_local_model_path": "/models/here",
    }
    if old:
        todays = {"hf_local_model_path": "local_model_path"}
        generator = {todays.get(key, f"generator_{key}"): value for key, value in params.items()}
    else:
        generator = {"generator_model_platform_args": params}
    raw, notes = translate({"generator": {"generator_model_name": "m", "num_gpus": 1} | generator}, "c")
    assert raw["model"] == "/models/here"
    assert raw["sampling"] == {"max_new_tokens": 7}
    assert raw["speculation"] == {"method": "draft_model", "draft_model": "d"}
    assert raw["runner_args"] == {
        "num_gpus": 1,
        "model_args": {"dtype": "float16"},
        "tokenizer_args": {"padding_side": "left"},
        "encode_args": {"truncation": True},
    }
    assert notes == []


def test_use_vllm_chooses_vllm_and_the_section_misc_sets_its_gpus():
    generator = {"generator_model_name": "m", "use_vllm": True, "vllm_sampling_params": {"max_tokens": 3}}
    raw, _ = translate({"misc": {"num_gpus": 2}, "generator": generator}, "c")
    assert (raw["runner"], raw["sampling"]["max_new_tokens"]) == ("vllm", 3)
    assert raw["runner_args"] == {"tensor_parallel_size": 2}


def test_a_key_in_its_section_comes_before_the_same_at_the_top_level_and_before_its_older_name():
    retriever = {"retriever_top_k": 7, "top_k_embeddings": 3}
    raw = {"generator": {"generator_model_name": "inside"}, "data": {"data_dir": "d"}, "retriever": retriever}
    config, notes = config_of({"generator_model_name": "outside", "data_dir": "d", **raw}, "c.yaml")
    assert (config.model, config.retrieval.top_k) == ("inside", 7)
    first = "is set, and comes first"
    assert f"c.yaml: generator_model_name: ignored; generator.generator_model_name {first}" in notes
    assert f"c.yaml: retriever.top_k_embeddings: ignored; retriever.retriever_top_k {first}" in notes
    assert not any("data_dir: ignored" in note for note in notes)  # both say the same


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        ({"generator_model_platform": "bedrock"}, 'generator_model_platform: "bedrock" is not supported'),
        ({"generator_model_platform": "openai"}, 'generator_model_platform: "openai" is not supported'),
        ({"use_bedrock": True}, 'use_bedrock: "bedrock" is not supported'),
        ({"generator_model_name": "gpt-4-turbo"}, 'generator_model_name: "gpt-4-turbo": "openai"'),
        ({"generator_model_platform": ["vllm"]}, "generator_model_platform: .* is not supported"),
    ],
)
def test_models_of_remote_platforms_are_refused_with_what_to_do_instead(generator, message):
    raw = {"generator": {"generator_model_name": "anthropic.claude", **generator}}
    with pytest.raises(ConfigError, match=message) as refused:
        config_of(raw, "c.yaml")
    assert (
        "huggingface or vllm" in str(refused.value)
        or "did you mean" in str(refused.value)
        or "known:" in str(refused.value)
    )


def test_another_model_takes_the_place_of_a_remote_one_with_the_other_settings():
    generator = {
        "generator_model_name": "anthropic.claude",
        "generator_model_platform": "bedrock",
        "generator_query_prefix": "Be brief.",
        "generator_model_platform_args": {"hf_generate_params": {"max_new_tokens": 9}},
    }
    for config, notes in (
        config_of({"generator": generator}, "c", ["model=m/x"]),
        config_of({"generator": generator, "model": "m/x"}, "c"),
    ):
        assert (config.model, config.sampling.max_new_tokens) == ("m/x", 9)
        assert config.prompt.query_prefix == "Be brief.\n"
        assert any('"bedrock" is not supported' in note for note in notes)


def test_without_a_generator_the_model_is_asked_for():
    raw = {"data": {"data_dir": "docs"}, "retriever": {"retriever_top_k": 3}}
    with pytest.raises(ConfigError, match=r"generator_model_name: missing; .* --set model=NAME"):
        config_of(raw, "c.yaml")
    config, _ = config_of(raw, "c.yaml", ["model=demo"])
    assert (config.model, config.runner, config.retrieval.top_k) == ("demo", "huggingface", 3)


def test_keys_of_ragspec_may_stand_beside_theirs():
    raw = {
        "generator_model_name": "m",
        "generator_model_platform_args": {"hf_generate_params": {"assistant_model": "d", "max_new_tokens": 5}},
        "sampling": {"stop": "x"},
        "speculation": {"method": "context"},
        "runner_args": {"batch_size": 2},
        "output": "o.jsonl",
    }
    config, _ = config_of(raw, "c")
    assert config.sampling.model_dump(exclude_defaults=True) == {"max_new_tokens": 5, "stop": ["x"]}
    assert config.speculation.model_dump(exclude_defaults=True) == {"method": "context"}
    assert config.runner_args == {"batch_size": 2}


NATIVE = [
    {"model": "demo"},
    {"model": "demo", "runner": "fake", "retrieval": {"index": "i", "chunk_size": 100, "embedding_model": "m"}},
    {"runner": "fake", "input": "in.jsonl"},
    {"input": "in.jsonl", "retrieval": {"index": "i"}},
    {"model": "demo", "retriever": {"index": "i", "top_k": 3}},  # misspelt: retrieval
    {"model": "demo", "data": {"path": "in.jsonl"}},
    {"model": "demo", "generator": None},
    {"model": "demo", **dict.fromkeys(ALSO_NATIVE, 1)},
    {},
]


@pytest.mark.parametrize("raw", NATIVE)
def test_a_config_of_ragspec_is_not_taken_for_one_of_theirs(raw):
    assert not is_autogluon(raw)


@pytest.mark.parametrize("path", sorted((ROOT / "sample_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_sample_configs_are_taken_for_what_they_are(path):
    assert is_autogluon(yaml.safe_load(path.read_text())) == path.name.startswith("autogluon")


@CASES
def test_every_config_of_its_history_is_recognised(text):
    assert is_autogluon(yaml.safe_load(text))


def names_of(model):
    for name, field in model.model_fields.items():
        yield name
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from names_of(part)


def test_no_key_of_ours_alone_makes_a_config_theirs():
    ours = {*names_of(RunConfig), *(name for word in runners.names() for name in names_of(runners.module(word).Args))}
    assert {key for key in ours if is_autogluon({key: "x", "model": "demo"})} == set()
    assert set(ALSO_NATIVE) == ours & FLAT.keys()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"data": {"data_dir": "s3://b/docs/"}}, r"aws s3 sync.*ragspec index --config c.yaml --corpus FOLDER"),
        ({"data": {"data_dir": "docs/", "s3_bucket": "b"}}, "no documents from S3"),
        ({"data_s3_bucket": "b", "data_dir": "docs/"}, "no documents from S3"),
        ({"data": {"web_urls": ["https://example.org"]}}, "save them as .html files in data_dir"),
        (
            {"data": {"data_dir": "d"}, "embedding": {"embedding_model": "e", "embedding_model_platform": "bedrock"}},
            'embedding_model_platform: "bedrock" is not supported; .*sentence-transformers',
        ),
        ({"data": {"data_dir": "d"}, "embedding": {"use_bedrock": True}}, 'embedding.use_bedrock: "bedrock"'),
        ({"embedding": {"embedding_model_platform": "openai"}}, '"openai" is not supported'),
    ],
)
def test_what_cannot_be_indexed_says_what_to_do_and_stops_only_the_index(raw, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=message):
        load_retrieval("c.yaml", [], {})
    load_retrieval("c.yaml", [], {}, builds=False)
    load_retrieval("c.yaml", [], {"corpus": ["docs"], "embedding_model": "demo"})
    _, notes = load_config("c.yaml", ["model=demo", "retrieval.top_k=5"])
    assert sum(bool(re.search(message, note)) for note in notes) == 1


def test_an_index_of_faiss_or_milvus_is_ignored_with_what_to_do():
    vector_db = {"use_existing_vector_db": True, "vector_db_index_path": "i.idx", "milvus_db_name": "m.db"}
    _, notes = config_of({"data": {"data_dir": "d"}, "vector_db": vector_db}, "c.yaml", ["model=demo"])
    note = next(note for note in notes if "section vector_db" in note)
    assert "use_existing_vector_db, vector_db_index_path, milvus_db_name: ignored" in note
    assert "ragspec index builds a LanceDB index" in note
    assert any("build it with ragspec index --config c.yaml" in note for note in notes)


def test_without_data_dir_the_retrieval_sections_serve_when_documents_are_given_elsewhere():
    raw = {"data": {"chunk_size": 400}, "retriever": {"retriever_top_k": 7}}
    assert config_of(raw, "c", ["model=demo"])[0].retrieval is None
    given, _ = config_of(raw, "c", ["model=demo", "retrieval.index=i"])
    assert (given.retrieval.index, given.retrieval.top_k, given.retrieval.chunk_size) == ("i", 7, 100)


@pytest.mark.parametrize("size", [None, 1, 32, 128, 512, 4000])
@pytest.mark.parametrize("overlap", [None, 0, 1, 64, 128, 3999])
def test_any_size_of_chunk_and_overlap_is_one_that_ragspec_takes(size, overlap):
    data = {"data_dir": "d", "chunk_size": size, "chunk_overlap": overlap}
    config, _ = config_of({"data": data}, "c", ["model=demo"])
    assert config.retrieval.chunk_size == max((size or 512) // 4, 16)
    wanted = (64 if overlap is None else overlap) // 4
    assert config.retrieval.chunk_overlap == min(wanted, config.retrieval.chunk_size // 2)


@pytest.mark.parametrize(
    "retriever",
    [
        {"retriever_top_k": 0},
        {"top_k_embeddings": 0},
        {"use_reranker": True, "reranker_model_name": "m/r", "reranker_top_k": 0},
    ],
)
def test_no_contexts_are_retrieved_where_their_number_is_0(retriever):
    config, notes = config_of({"data": {"data_dir": "d"}, "retriever": retriever}, "c", ["model=demo"])
    assert config.retrieval is None
    assert any("no contexts are retrieved" in note for note in notes)


def test_file_types_are_passed_on_whatever_they_are():
    for key in ("file_extns", "file_exts", "data_file_extns"):
        raw = {"data": {"data_dir": "d", key: ["pdf", ".docx"]}}
        assert config_of(raw, "c", ["model=demo"])[0].retrieval.file_types == ["pdf", ".docx"]


SECRETS = ("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "sk-abcdEFGH1234mnop", "letmein9")


@pytest.mark.parametrize(
    "raw",
    [
        {"data": {"login_info": {"https://e.org": {"credentials": {"username": "me", "password": SECRETS[3]}}}}},
        {"data": {"login_info": SECRETS[2], "data_dir": "d"}},
        {"generator": {"generator_model_platform_args": {"openai_api_key": SECRETS[2], "openai_key_file": "k.txt"}}},
        {"generator": {"generator_model_platform_args": {"bedrock_generate_params": {"secret": SECRETS[1]}}}},
        {"generator": {"generator_model_platform_args": SECRETS[2]}},
        {"embedding": {"embedding_model_platform_args": {"aws_access_key_id": SECRETS[0]}}},
        {"embedding": SECRETS[0]},
        {"vector_db": SECRETS[3]},
        {"openai_api_key": SECRETS[2], "generator": {"generator_model_platform": "openai"}},
        {"openai_key": SECRETS[3], "generator": None},
        {"vector_db": {"password": SECRETS[3]}},
        {"data": {"data_dir": f"s3://{SECRETS[0]}:{SECRETS[1]}@b/docs"}},
        {"generator": {"generator_model_platform": SECRETS[2]}},
    ],
)
@pytest.mark.parametrize("load", ["generate", "index"])
def test_no_note_or_error_shows_a_secret(raw, load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw))
    try:
        said = load_config("c.yaml", ["model=demo"])[1] if load == "generate" else load_retrieval("c.yaml", [], {})[1]
    except ConfigError as error:
        said = [str(error)]
    assert not [secret for secret in SECRETS if secret in "\n".join(said)]
    assert all("[secret]" not in note for note in said if "openai_key_file" in note)  # it only names a file


def test_a_key_that_is_there_twice_has_its_last_value_in_their_files_only(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("retriever:\n  retriever_top_k: 3\n  retriever_top_k: 8\ndata: {data_dir: d}\n")
    config, notes = load_config(str(path), ["model=demo"])
    assert config.retrieval.top_k == 8
    assert any(
        'c.yaml:3: not valid YAML: key "retriever_top_k" appears twice; its last value' in note for note in notes
    )
    path.write_text("model: demo\nsampling: {seed: 1, seed: 2}\n")
    with pytest.raises(ConfigError, match="appears twice"):
        load_config(str(path))


def test_documents_are_indexed_and_questions_answered_without_a_generator_section(tmp_path, monkeypatch):
    pytest.importorskip("lancedb")
    from ragspec.retrieval.build import build
    from ragspec.run.generate import generate

    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("The tower is 300 metres high.\n")
    (tmp_path / "docs" / "b.log").write_text("not wanted")
    (tmp_path / "in.jsonl").write_text('{"id": "q", "query": "How high is the tower?"}\n')
    (tmp_path / "c.yaml").write_text("data: {data_dir: docs, file_extns: [txt]}\nvector_db: {db_type: faiss}\n")
    summary = build(load_retrieval("c.yaml", [], {})[0])
    assert summary.chunks_written == 1
    config, _ = load_config("c.yaml", ["runner=fake", "input=in.jsonl", "output=out.jsonl"])
    generate(config)
    assert "300 metres" in (tmp_path / "out.jsonl").read_text()
