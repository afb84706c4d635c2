"""What the user wrote, checked: `load_config("c.yaml", ["sampling.seed=1"])` -> (RunConfig, notes).

Unknown keys are errors with a suggestion; every message names file, key, value and what is allowed.
Limit: only what the text of the config can tell is judged here; models and tokenizers are `Runner.check`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, cast, get_args

from pydantic import BaseModel, ValidationError

from ragspec import runners
from ragspec.config.secret import Address, Secret, Settings, as_given, concealed, secrets_in
from ragspec.config.secret_words import names_secret
from ragspec.config.sections import PromptConfig, RetrievalConfig, SamplingConfig, Section, SpeculationConfig
from ragspec.config.translate.autogluon import is_autogluon, translate
from ragspec.config.translate.vllm import modernise
from ragspec.config.veil import Veil
from ragspec.config.yaml_file import parse_yaml, read_yaml
from ragspec.errors import ConfigError
from ragspec.records import Sampling
from ragspec.runners.base import RunnerArgs
from ragspec.suggest import did_you_mean

TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")
SEARCH_KEYS = ("top_k", "mode", "candidates", "reranker_model", "order")


class RunConfig(Section):
    """One run: a model, a runner, records in, answers out."""

    model: Address | None = None
    runner: str = "huggingface"
    input: str | None = None  # a path, or - for stdin
    output: str = "-"  # a path, or - for stdout
    order: Literal["input", "finish"] = "input"
    prompt: PromptConfig = PromptConfig()
    sampling: SamplingConfig = SamplingConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    retrieval: RetrievalConfig | None = None
    runner_args: Settings = {}

    def args(self) -> RunnerArgs:
        """Return `runner_args` as the runner's own model. Raises ConfigError."""
        model: type[RunnerArgs] = runners.module(self.runner).Args
        return cast(RunnerArgs, _validate(model, self.runner_args, "config", "runner_args"))

    def as_given(self) -> dict[str, Any]:
        """Return the config as the user wrote it, secrets in the clear: for another process, never for a file."""
        whole: dict[str, Any] = as_given(self.model_dump())
        return whole

    def veil(self) -> Veil:
        """Return what takes this config's secrets out of messages."""
        return Veil(self.model_dump())

    def identity(self) -> dict[str, Any]:
        """Return the part of the config that an answer depends on; a resumed run must agree on it."""
        whole = self.model_dump(mode="json", exclude={"input", "output", "order"})
        if self.retrieval:  # how the index was built is the index's own matter
            whole["retrieval"] = {key: whole["retrieval"][key] for key in SEARCH_KEYS}
        if self.sampling.temperature == 0:  # what is sampled in a padded batch depends on the batch
            for key in self.args().neutral_keys():
                whole["runner_args"].pop(key, None)
        return whole


def to_sampling(config: SamplingConfig) -> Sampling:
    """Return the config's section as the plain value that travels with a request."""
    return Sampling(**{**config.model_dump(), "stop": tuple(config.stop)})


def load_config(path: str, overrides: Sequence[str] = (), **direct: Any) -> tuple[RunConfig, list[str]]:
    """Return the config of file `path` and notes on what was translated or ignored.

    overrides: "key.path=value" with YAML values (`--set`). direct: top-level keys that are not None win over both.
    Raises ConfigError.
    """
    raw = read_yaml(path)
    with _veil(raw, path).over_errors():
        notes: list[str] = []
        if is_autogluon(raw):
            raw, notes = translate(raw, path)
        for override in overrides:
            _set(raw, override)
        notes += _modernise(raw, path)
        raw |= {key: value for key, value in direct.items() if value is not None}
        raw = {key: value for key, value in raw.items() if value is not None}  # a section with all keys commented out
        config = build_config(raw, path)
    return config, [config.veil()(note) for note in notes]


def build_config(raw: dict[str, Any], source: str = "config") -> RunConfig:
    """Return `raw` as a checked RunConfig; `source` begins every message. Raises ConfigError."""
    config = cast(RunConfig, _validate(RunConfig, raw, source))
    try:
        _check(config)
        config.args()
    except ConfigError as error:
        raise ConfigError(f"{source}: {str(error).removeprefix('config: ')}") from None
    _check_references(config.model_dump(), source)
    return _with_template_text(config, source)


def load_retrieval(
    path: str | None, overrides: Sequence[str], direct: dict[str, Any]
) -> tuple[RetrievalConfig, list[str]]:
    """Return the retrieval section of config `path`, if one is named, with `direct` over it, and notes.

    Raises ConfigError, for the rest of the config too.
    """
    source = path or "command line"
    raw = read_yaml(path) if path is not None else {}
    with _veil(raw, source).over_errors():
        notes: list[str] = []
        if is_autogluon(raw):
            raw, notes = translate(raw, source)
        for override in overrides:
            _set(raw, override)
        section = raw.get("retrieval") or {}
        if isinstance(section, dict):
            raw["retrieval"] = section = {**section, **direct}
            if "index" not in section:
                raise ConfigError(f"{source}: retrieval.index: missing; say where the index is (a folder)")
        raw = {key: value for key, value in raw.items() if value is not None}
        config = cast(RunConfig, _validate(RunConfig, raw, source)).retrieval
        assert config is not None
        _check_retrieval(config)
        _check_references({"retrieval": config.model_dump()}, source)
    return config, notes


def _veil(raw: dict[str, Any], source: str) -> Veil:
    try:
        return Veil(concealed(raw))
    except RecursionError:
        raise ConfigError(f"{source}: nested too deep, or in itself") from None


def _modernise(raw: dict[str, Any], source: str) -> list[str]:
    """Move vLLM's speculation arguments, today's and those of 2024, from `runner_args` to `speculation`."""
    args = raw.get("runner_args")
    if raw.get("runner") != "vllm" or not isinstance(args, dict):
        return []
    rest, speculation, notes = modernise(args)
    if not notes and speculation == {"method": "none"}:
        return []
    if raw.get("speculation"):
        moved = ", ".join(key for key in args if key not in rest)
        raise ConfigError(f"{source}: runner_args.{moved}: says again what speculation says; keep the one or the other")
    raw |= {"runner_args": rest, "speculation": speculation}
    return [f"{source}: runner_args.{note}" for note in notes]


def _check(config: RunConfig) -> None:
    """Judge what one key cannot tell alone."""
    if config.retrieval:
        _check_retrieval(config.retrieval)
        if config.prompt.source not in ("auto", "query"):
            raise ConfigError(f'prompt.source: "{config.prompt.source}": retrieval fills contexts of queries only')
    spec = config.speculation
    runners.check_method(config.runner, spec.method)
    if (spec.speculative_config is not None) != (spec.method == "speculative_config"):
        raise ConfigError(
            "speculation.speculative_config: goes with method: speculative_config (runner vllm), and with no other"
        )
    if config.model is None and config.runner != "fake":
        raise ConfigError('model: missing; give a hub id, a folder, a .gguf file or "demo"')
    if spec.method == "draft_model" and not spec.draft_model:
        raise ConfigError('speculation.draft_model: missing; method "draft_model" needs the name of a draft model')
    if spec.method == "early_exit" and spec.early_exit_layer is None:
        raise ConfigError(
            'speculation.early_exit_layer: missing; method "early_exit" needs the layer to draft from, for instance 4'
        )
    if spec.method in ("none", "context", "prompt_lookup") and (spec.draft_model or spec.draft_tokenizer):
        raise ConfigError(
            f'speculation.draft_model: "{spec.draft_model or spec.draft_tokenizer}" has no use with method '
            f'"{spec.method}"; set speculation.method: draft_model, or take the draft out'
        )
    if spec.ngram_min and spec.ngram_max and spec.ngram_min > spec.ngram_max:
        raise ConfigError(f"speculation.ngram_min: {spec.ngram_min} is over ngram_max ({spec.ngram_max})")


def _check_retrieval(retrieval: RetrievalConfig) -> None:
    if retrieval.chunk_overlap > retrieval.chunk_size // 2:
        raise ConfigError(
            f"retrieval.chunk_overlap: {retrieval.chunk_overlap} is over half of chunk_size ({retrieval.chunk_size})"
        )
    for key, value in retrieval.storage_options.items():
        if names_secret(key) and not (isinstance(value, Secret) and value.is_reference):
            raise ConfigError(
                f"retrieval.storage_options.{key}: an object store's secrets do not go into a config; set "
                f"{key.upper()} in the environment, or write ${{NAME}} here, a variable's name"
            )


def _check_references(value: Any, source: str) -> None:
    """Raise ConfigError for an environment variable that the config names and that is not set."""
    for path, secret in secrets_in(value):
        try:
            secret.reveal()
        except ConfigError as error:
            raise ConfigError(f"{source}: {path}: {error}") from None


def _with_template_text(config: RunConfig, source: str) -> RunConfig:
    """Put the text of a template file in the place of its name, so that the resolved config stands alone."""
    template = config.prompt.template
    if template is None or not template.endswith(TEMPLATE_SUFFIXES):
        return config
    try:
        text = Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f'{source}: prompt.template: cannot read "{template}" ({error}); give a file or the text itself'
        ) from None
    return config.model_copy(update={"prompt": config.prompt.model_copy(update={"template": text})})


def _set(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f'--set: "{override}" is not KEY.PATH=VALUE, for instance sampling.temperature=0.7')
    *parents, last = key.split(".")
    place = raw
    for parent in parents:
        if place.get(parent) is None:
            place[parent] = {}
        place = place[parent]
        if not isinstance(place, dict):
            raise ConfigError(f'--set: "{key}": "{parent}" holds a value, not keys')
    place[last] = parse_yaml(value, f"--set {key} (a value with YAML's special characters needs quotes)")


def _validate(model: type[BaseModel], raw: Any, source: str, prefix: str = "") -> BaseModel:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{source}: {_explain(model, cast(dict[str, Any], first), prefix)}") from None


def _explain(model: type[BaseModel], error: dict[str, Any], prefix: str) -> str:
    """Return one line for pydantic's first complaint: key, value, what is allowed."""
    path = [str(part) for part in error["loc"] if not (isinstance(part, str) and part in _UNION_TAGS)]
    key = ".".join(([prefix] if prefix else []) + path)
    if error["type"] == "extra_forbidden":
        return f'"{key}" is not a known key{did_you_mean(path[-1], _fields(model, path[:-1]))}'
    allowed = error["msg"].replace("Input should be ", "must be ").replace("String should", "must")
    if error["type"] == "value_error":
        return f"{key}.{allowed.removeprefix('Value error, ')}"
    if error["type"] == "model_type":
        allowed = "must hold keys and values"
    alternatives = _alternatives(model, path)
    value = concealed({path[-1] if path else "": error["input"]})
    return f"{key}: {_short(*value.values())} is not allowed: {alternatives or allowed}"


# pydantic adds the tried branch of a union to the location
_UNION_TAGS = {"int", "bool", "str", "float", "literal['auto']", "constrained-int"}


def _alternatives(model: type[BaseModel], path: list[str]) -> str:
    """Return what a union of a type and "auto" takes; pydantic would complain of one branch only."""
    if path[-1:] in (["num_tokens"], ["batch_size"]):
        return 'must be a whole number from 1, or "auto"'
    return 'must be true, false or "auto"' if path[-1:] == ["chat"] else ""


def _fields(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        inner: Any = model.model_fields[part].annotation if part in model.model_fields else None
        inner = next((choice for choice in get_args(inner) if choice is not NoneType), inner)  # left out: None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
