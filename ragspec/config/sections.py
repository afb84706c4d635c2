"""The parts of a config, as the user writes them: each a frozen model, closed to unknown keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ragspec.config.secret import Address, Settings, StringSettings


class Section(BaseModel):
    """The root of every part of the config: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _at_home(path: str) -> str:
    return str(Path(path).expanduser()) if path.startswith("~") else path


BatchSizeRange = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=3, max_length=3)]


class PromptConfig(Section):
    """How a record becomes a prompt."""

    source: Literal["auto", "query", "messages", "prompt"] = "auto"  # auto: the first of the three that is there
    system: str | None = None
    template: str | None = None  # Jinja2 text of the user message, a .jinja file, or "citations"
    chat: Literal["auto"] | bool = "auto"  # auto: the model's chat template where it has one
    query_prefix: str = ""
    allow_special_tokens: bool = False  # of records: `<|im_end|>` in a passage ends a turn
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None


class SamplingConfig(Section):
    """How tokens are chosen, for every record that does not say otherwise."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], BeforeValidator(_listed, json_schema_input_type=str | list[str])
    ] = []
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class SpeculationConfig(Section):
    """Where drafts come from and how long they are."""

    method: str = "none"
    num_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    draft_model: Address | None = None
    draft_tokenizer: Address | None = None  # a draft of another vocabulary: universal assisted decoding
    draft_trust_remote_code: bool = False  # run code that comes with the draft model and its tokenizer
    ngram_max: Annotated[int, Field(ge=1)] | None = None  # prompt_lookup: longest n-gram looked up
    ngram_min: Annotated[int, Field(ge=1)] | None = None  # prompt_lookup: shortest
    isolate: bool = False  # context: no drafts from other records' passages and answers
    early_exit_layer: Annotated[int, Field(ge=1)] | None = None
    confidence_threshold: Annotated[float, Field(ge=0, le=1)] | None = None  # a draft stops below this probability
    schedule: Literal["constant", "heuristic_transient"] = "constant"  # of num_tokens, within one record
    num_tokens_by_batch_size: list[BatchSizeRange] | None = None  # vllm: [first, last, num_tokens] a row
    extra: Settings = {}  # huggingface: the draft's generation_config; vllm: further speculative_config keys
    speculative_config: Settings | None = None  # vllm: the whole of it as it is, for what comes next


class RetrievalConfig(Section):
    """Where contexts come from, for records that bring none; and how the index is built."""

    index: Annotated[
        Address, Field(min_length=1), AfterValidator(_at_home)
    ]  # a folder, or an object store's address (s3://...)
    top_k: Annotated[int, Field(ge=1)] = 5
    mode: Literal["auto", "bm25", "dense", "hybrid"] = "auto"  # auto: hybrid where the index has vectors
    candidates: Annotated[int, Field(ge=1)] = 50  # that each search hands to fusion and to the reranker
    reranker_model: Address | None = None  # a cross-encoder of sentence-transformers
    order: Literal["score", "canonical"] = "score"  # canonical: by id, so that equal sets make equal prefixes
    storage_options: StringSettings = {}  # of the object store; its secrets stay in the environment
    corpus: Annotated[
        list[str], BeforeValidator(_listed, json_schema_input_type=str | list[str])
    ] = []  # `ragspec index`: files and folders
    file_types: Annotated[
        list[str], BeforeValidator(_listed, json_schema_input_type=str | list[str])
    ] = []  # `ragspec index`: endings to take; all by default
    chunk_size: Annotated[int, Field(ge=16)] = 512  # tokens of a passage, its title counted
    chunk_overlap: Annotated[int, Field(ge=0)] = 64  # tokens that neighbours may share
    embedding_model: Address | None = None  # a sentence-transformers model (hub id, folder, demo); none: words only
    tokenizer: Address | None = None  # whose tokens are counted; the embedding model's by default, else words
    language: str = "English"  # of stemming and stop words; none: neither
