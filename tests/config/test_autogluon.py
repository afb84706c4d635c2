import pytest

from ragspec.config.load import build_config, load_config
from ragspec.config.translate.autogluon import translate
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
    with pytest.raises(ConfigError, match="reranker_model_name"):
        translate(RETRIEVING | {"retriever": {"use_reranker": True}}, "c")
