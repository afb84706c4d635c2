"""The sections of a config as pydantic models, and pydantic's errors as one line each.

The text under a key is its description: in the JSON schema, in editors, and in docs/reference/config.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Self, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ragspec.config.redaction import Address, Settings, StringSettings, redacted
from ragspec.errors import ConfigError, did_you_mean
from ragspec.speculation.methods import DrafterSettings


def validate(model: type[BaseModel], raw: Any, source: str, prefix: str = "") -> BaseModel:
    """Return `raw` as a `model`. source, prefix: the file and key that messages begin with. Raises ConfigError."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{source}: {_explain(model, cast(dict[str, Any], first), prefix)}") from None


def _explain(model: type[BaseModel], error: dict[str, Any], prefix: str) -> str:
    """Return one line for pydantic's first error: key, value, what is allowed."""
    path = [str(part) for part in error["loc"] if not (isinstance(part, str) and part in _UNION_TAGS)]
    key = ".".join(([prefix] if prefix else []) + path)
    if error["type"] == "extra_forbidden":
        return f'"{key}" is not a known key{did_you_mean(path[-1], _fields(model, path[:-1]))}'
    if error["type"] == "missing":
        return f"{key}: missing{_REMEDIES.get(key, '')}"
    allowed = error["msg"].replace("Input should be ", "must be ").replace("String should", "must")
    if error["type"] == "value_error":
        return f"{key}.{allowed.removeprefix('Value error, ')}"
    if error["type"] == "model_type":
        allowed = "must contain keys and values"
    if error["type"] == "string_type" and isinstance(error["input"], bool):
        allowed += "; in YAML, a text such as yes, no, on, off or true needs quotes"
    alternatives = _alternatives(model, path)
    value = redacted({path[-1] if path else "": error["input"]})
    return f"{key}: {_short(*value.values())} is not allowed: {alternatives or allowed}"


_REMEDIES = {"retrieval.index": "; name the folder of the index"}

# names of the tried union branches, which pydantic adds to an error's location
_UNION_TAGS = {"int", "bool", "str", "float", "literal['auto']", "constrained-int"}


def _alternatives(model: type[BaseModel], path: list[str]) -> str:
    """Return what a union of a type and "auto" allows; pydantic would describe only one branch."""
    if path[-1:] in (["num_tokens"], ["batch_size"]):
        return 'must be a whole number from 1, or "auto"'
    return 'must be true, false or "auto"' if path[-1:] == ["chat"] else ""


def _fields(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        inner: Any = model.model_fields[part].annotation if part in model.model_fields else None
        inner = next((choice for choice in get_args(inner) if choice is not NoneType), inner)
        inner = get_args(inner)[0] if get_origin(inner) is Annotated else inner
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


# -- sections --------------------------------------------------------------------------------------


class Section(BaseModel):
    """Base class of all sections: frozen, strict about types, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def listed(value: Any) -> Any:
    """Return a single text as a list."""
    return [value] if isinstance(value, str) else value


def _at_home(path: str) -> str:
    return str(Path(path).expanduser()) if path.startswith("~") else path


def _by_token_id(value: Any) -> Any:
    """Return a mapping with integer keys: JSON's keys are strings."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: bias for key, bias in value.items()}


def _greedy_if_tiny(temperature: float) -> float:
    """Return 0 for a tiny temperature: scores divided by it would overflow. Limit: vLLM's, sampling_params.py."""
    return 0.0 if temperature < LEAST_TEMPERATURE else temperature


OneOrMore = Annotated[list[str], BeforeValidator(listed, json_schema_input_type=str | list[str])]
LONG_ANSWER = 256  # tokens
LEAST_TEMPERATURE = 1e-5
Bias = Annotated[float, Field(ge=-100, le=100)]
BatchSizeRange = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=3, max_length=3)]


class PromptConfig(Section):
    """How a record becomes a prompt."""

    source: Literal["auto", "query", "messages", "prompt"] = "auto"
    """Which field of a record is the prompt; `auto` uses the first of `query`, `messages` and `prompt` found."""
    system: str | None = None
    """System prompt. A record's own `messages` may contain another."""
    template: str | None = None
    """Jinja2 template of the user message, the name of a `.jinja`, `.jinja2` or `.j2` file, or `citations` (passages
    are numbered, and the model is asked to cite them like `[1]`). It can use `query`, `contexts` (each with `id`,
    `title`, `text`, `score`), `system`, `metadata`, `id` and `chat`."""
    chat: Literal["auto"] | bool = "auto"
    """Whether to use the model's chat template: `auto` (if there is one), `true` or `false`."""
    chat_template_kwargs: Settings = {}
    """More arguments for the chat template, such as `{enable_thinking: false}`. A record's own take precedence."""
    split_reasoning: bool = True
    """Write what the model thinks before it answers (between `<think>` and `</think>`, or its tokenizer's own markers)
    to `reasoning`, next to `output`. Stop strings, `structured`, `copied` and `evaluate` apply to the answer only."""
    query_prefix: str = ""
    """Text to put before every query."""
    allow_special_tokens: bool = False
    """Let control words in records (`<|im_end|>`, `</s>`, `<think>`) act as control tokens; see
    [records are text](../guide/inputs.md#records-are-text)."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest prompt, in tokens. The model's context length minus `max_new_tokens` always applies."""
    max_passages: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of passages in a prompt; the least relevant are dropped."""
    order: Literal["rank", "canonical", "shared"] = "rank"
    """Order of a record's passages: as given (`rank`), the same for all records (`canonical`), or the order that
    minimises computed tokens over all records (`shared`); see
    [prompts](../guide/prompts.md#the-order-of-passages)."""
    keep_first: Annotated[int, Field(ge=0)] = 0
    """`order: shared`: keep this many of each record's first passages in place."""
    show_ranks: bool = False
    """Tell the model which passages are most relevant: `best_first` in your template, a line in the built-in ones."""
    order_window: Annotated[int, Field(ge=2)] = 4096
    """`order: shared`: how many records are read and ordered together."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.keep_first and self.order != "shared":
            raise ValueError("keep_first is for order: shared")
        return self


class SamplingConfig(Section):
    """How tokens are chosen. Settings in the `body` of an OpenAI batch line take precedence; other lines have none."""

    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest answer, in tokens. By default, `default_new_tokens`, or less if the context has less room."""
    default_new_tokens: Annotated[int, Field(ge=1)] = 128
    """Longest answer if neither the config nor a batch line sets one; shorter if less fits. (`run-batch`: 1024.)"""
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """Shortest answer, in tokens: end tokens and stop strings before that are ignored."""
    ignore_eos: bool = False
    """Continue after the model's end tokens, up to `max_new_tokens`."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    """More tokens that end an answer. They are not part of its text."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_greedy_if_tiny)] = 0.0
    """0 (or anything below 0.00001) is greedy decoding."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that together have this probability; 1 turns it off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many of the most likely tokens; 0 turns it off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Exclude tokens less likely than this share of the most likely token's probability; 0 turns it off."""
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Divides the scores of tokens that have already appeared; 1 turns it off."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from the score of every token already in the answer."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """The same, once per occurrence."""
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_by_token_id)] = {}
    """Added to token scores: `{token id: bias}`, from -100 to 100."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Write the log probability of each answer token and of this many of the most likely alternatives (0: only the
    token's own), by the model's own distribution, before temperature and penalties."""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    """Answers per record."""
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], BeforeValidator(listed, json_schema_input_type=str | list[str])
    ] = []
    """Strings that end an answer; they are not part of it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed for sampling; each record's random numbers depend on this seed and the record's id."""

    @property
    def expected_tokens(self) -> int:
        """Return an estimate of an answer's length: most answers end long before a high limit."""
        return min(self.longest, LONG_ANSWER)

    @property
    def longest(self) -> int:
        """Return the maximum answer length in tokens, unless a record sets its own."""
        return self.max_new_tokens or self.default_new_tokens


class SpeculationConfig(Section):
    """Where drafts come from and how long they are."""

    method: str = "none"
    """Where drafts come from; see [Methods](#methods)."""
    num_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Draft length, in tokens. `auto`: as many as pay off for each record and step, possibly none (stock `generate()`:
    its own default; `context` in vLLM: up to 15; vLLM's own methods: see [vLLM](../guide/runners.md#vllm))."""
    draft_model: Address | None = None
    """The draft model."""
    draft_tokenizer: Address | None = None
    """The draft model's name again, if its vocabulary differs from the target's: universal assisted decoding."""
    draft_model_args: Settings = {}
    """huggingface: passed to the draft model's `from_pretrained`, as `runner_args.model_args` are to the target's. A
    draft model with pickled weights needs `use_safetensors: false` here."""
    draft_trust_remote_code: bool = False
    """Run code that comes with the draft model or its tokenizer; `runner_args.trust_remote_code` covers the target
    only. vLLM 0.32 has one switch for both, so a draft model with its own code needs both keys there."""
    ngram_max: Annotated[int, Field(ge=1)] | None = None
    """Longest n-gram of `prompt_lookup` (3 by default, 4 in vLLM)."""
    ngram_min: Annotated[int, Field(ge=1)] | None = None
    """Shortest n-gram of `prompt_lookup` (1 by default, 2 in vLLM; stock `generate()` has no such setting)."""
    isolate: bool = False
    """`context`, `auto`: draft from the record's own text only, not from other records' passages and answers
    (`--isolate`)."""
    early_exit_layer: Annotated[int, Field(ge=1)] | None = None
    """The layer that `early_exit` drafts from."""
    confidence_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """A draft model stops drafting below this probability (transformers' default: 0.4)."""
    schedule: Literal["constant", "heuristic_transient"] = "constant"
    """`heuristic_transient` adapts the draft length within a record."""
    num_tokens_by_batch_size: list[BatchSizeRange] | None = None
    """vllm: draft length by batch size, a list of `[smallest, largest, num_tokens]`: `[[1, 8, 5], [9, 256, 0]]`."""
    extra: Settings = {}
    """huggingface: `assistant_lookbehind`, `target_lookbehind`; vllm: more keys of `speculative_config`."""
    speculative_config: Settings | None = None
    """vllm, with `method: speculative_config`: vLLM's own setting, passed on unchanged."""

    @property
    def draft_tokens(self) -> int | None:
        """Return `num_tokens`, None for "auto"."""
        return None if self.num_tokens == "auto" else self.num_tokens

    @property
    def drafting(self) -> DrafterSettings:
        """Return the settings of drafters."""
        return DrafterSettings(self.ngram_min, self.ngram_max, self.isolate)


class RetrievalConfig(Section):
    """Passages for records that have a `query` but no `contexts` (an empty list requests none), and how the index is
    built."""

    index: Annotated[Address, Field(min_length=1), AfterValidator(_at_home)]
    """Folder of the index, or its URL on an object store (`s3://...`)."""
    top_k: Annotated[int, Field(ge=1)] = 5
    """Passages per query."""
    mode: Literal["auto", "bm25", "dense", "hybrid"] = "auto"
    """`bm25`, `dense` or `hybrid`; `auto` is hybrid if the index has vectors, else BM25."""
    candidates: Annotated[int, Field(ge=1)] = 50
    """How many passages each search passes to rank fusion and to the reranker."""
    reranker_model: Address | None = None
    """A sentence-transformers cross-encoder: hub id or folder."""
    order: Literal["score", "canonical"] = "score"
    """Order of retrieved passages: by `score`, or `canonical` (by id, so that records with the same passages share a
    prefix). `prompt.order` works for passages from any source and offers `shared`, which saves more."""
    storage_options: StringSettings = {}
    """Passed to LanceDB, for an object store. Credentials come from the environment (or `${NAME}`)."""
    corpus: OneOrMore = []
    """`ragspec index`: files and folders."""
    file_types: OneOrMore = []
    """`ragspec index`: file extensions to include from folders, for instance `[.md, .pdf]`; all by default."""
    chunk_size: Annotated[int, Field(ge=16)] = 512
    """Tokens per passage, title included; limited to what the embedding model reads."""
    chunk_overlap: Annotated[int, Field(ge=0)] = 64
    """Tokens that adjacent passages may share; the default is at most half of `chunk_size`."""
    embedding_model: Address | None = None
    """A sentence-transformers model: hub id, folder, or `demo`. Without one, search is by keyword only."""
    tokenizer: Address | None = None
    """Without an embedding model: the model whose tokenizer counts tokens; by default, words and punctuation."""
    language: str = "English"
    """Language for stemming (a LanceDB name), or `none`. Only English has stop words, which are not searched."""


class ScaleConfig(Section):
    """Several Ray workers: processes on this machine or on many."""

    engine: Literal["ray"] = "ray"
    """What runs the workers."""
    address: str = "local"
    """The cluster: `local` (on this machine, for this run), `auto` (set by `RAY_ADDRESS` or by `ray start` on this
    machine), `HOST:PORT`, or `ray://HOST:PORT`."""
    workers: Annotated[int, Field(ge=1)] = 1
    """How many workers to run, each with its own copy of the model. The run starts with as many as fit."""
    gpus_per_worker: Annotated[float, Field(ge=0)] | None = None
    """GPUs per worker. By default, as many as its engine uses (`tensor_parallel_size`), if there are any."""
    cpus_per_worker: Annotated[int, Field(ge=1)] | None = None
    """CPU cores and threads per worker. By default, each machine's cores are shared evenly."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Seconds of silence after which a worker is considered dead (ten times that while its model loads)."""
