"""What the user wrote, checked: `load_config("c.yaml", ["sampling.seed=1"])` -> (RunConfig, notes).

Unknown keys are errors with a suggestion; every message names file, key, value and what is allowed.
Limit: only the config's text is checked here; models and tokenizers are checked by `Runner.check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from ragspec import runners
from ragspec.config.check import validate
from ragspec.config.overrides import override
from ragspec.config.run import RunConfig
from ragspec.config.secret import Secret, concealed, secrets_in
from ragspec.config.secret_words import names_secret
from ragspec.config.sections import RetrievalConfig, SpeculationConfig
from ragspec.config.translate.autogluon import is_autogluon, translate
from ragspec.config.translate.vllm import modernise
from ragspec.config.veil import Veil
from ragspec.config.yaml_file import RepeatedKey, read_yaml
from ragspec.errors import ConfigError
from ragspec.speculation.methods import check_method, method_named

NEEDED = {
    "draft_model": "the name of a draft model",
    "early_exit_layer": "the layer to draft from, for instance 4",
    "speculative_config": "what vLLM is to be told",
}
INDEXED = ("corpus", "embedding_model")  # what an index that exists was built with
SHOWN = {"prompt", "sampling", "structured"}  # sections that hold no secrets, whatever their keys are called
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")


def load_config(path: str, overrides: Sequence[str] = (), **direct: Any) -> tuple[RunConfig, list[str]]:
    """Return the config of file `path` and notes on what was translated or ignored.

    overrides: "key.path=value" (`--set`, overrides.py). direct: top-level keys that are not None win over both.
    Raises ConfigError.
    """
    raw, said = read_config(path)
    config, notes = config_of(raw, path, overrides, **direct)
    return config, said + notes


def read_config(path: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values in file `path`, ragspec's or AutoGluon-RAG's, and notes. Raises ConfigError."""
    try:
        return read_yaml(path), []
    except RepeatedKey as error:
        raw = read_yaml(path, last_counts=True)
        if not is_autogluon(raw):
            raise
        return raw, [f"{error}; its last value counts, as in AutoGluon-RAG"]


def config_of(
    raw: dict[str, Any], source: str, overrides: Sequence[str] = (), **direct: Any
) -> tuple[RunConfig, list[str]]:
    """Return what load_config does, for a file's values `raw`, which it may change; `source` begins every message."""
    given = [key for key, value in direct.items() if value is not None]
    with _veil(raw, source).over_errors():
        raw, notes = _overridden(raw, source, overrides, given)
        notes += _modernise(raw, source)
        raw |= {key: _beside(raw.get(key), value) for key, value in direct.items() if value is not None}
        config = build_config(_without_empty(raw), source)
    return config, [config.veil()(note) for note in notes]


def build_config(raw: dict[str, Any], source: str = "config") -> RunConfig:
    """Return `raw` as a checked RunConfig; `source` begins every message. Raises ConfigError."""
    config = cast(RunConfig, validate(RunConfig, raw, source))
    try:
        _check(config)
        config.args()
    except ConfigError as error:
        raise ConfigError(f"{source}: {str(error).removeprefix('config: ')}") from None
    _check_references(config.model_dump(), source)
    return _with_structured(_with_template_text(config, source), source)


def load_retrieval(
    path: str | None, overrides: Sequence[str], direct: dict[str, Any], *, builds: bool = True
) -> tuple[RetrievalConfig, list[str]]:
    """Return the retrieval section of config `path`, if one is named, with `direct` over it, and notes.

    builds: whether an index is to be built, not searched. Raises ConfigError, for the rest of the config too.
    """
    source = path or "command line"
    raw, said = read_config(path) if path is not None else ({}, [])
    given = [f"retrieval.{key}" for key in (*direct, *(() if builds else INDEXED))]
    with _veil(raw, source).over_errors():
        raw, notes = _overridden(raw, source, overrides, given, only_retrieval=True)
        section = raw.get("retrieval") or {}
        if isinstance(section, dict):
            raw["retrieval"] = section = {**section, **direct}
            if "index" not in section:
                raise ConfigError(f"{source}: retrieval.index: missing; say where the index is (a folder)")
        config = cast(RunConfig, validate(RunConfig, _without_empty(raw), source)).retrieval
        assert config is not None
        _check_retrieval(config)
        _check_references({"retrieval": config.model_dump()}, source)
    return config, said + notes


def _overridden(
    raw: dict[str, Any], source: str, overrides: Sequence[str], given: Sequence[str], *, only_retrieval: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return `raw` in ragspec's own keys with `--set` applied, and notes on what was translated or ignored.

    given: further keys that are set after this.
    """
    notes: list[str] = []
    if is_autogluon(raw):
        keys = {*given, *(each.partition("=")[0] for each in overrides)}
        raw, notes = translate(raw, source, keys, only_retrieval=only_retrieval)
    later = dict(each.partition("=")[::2] for each in overrides)
    for each in overrides:
        override(raw, each, later)
    return raw, notes


def _beside(given: Any, path: Any) -> Any:
    """Return a section (input, output) with another path, where it says more than that; else the path alone."""
    return {**given, "path": path} if isinstance(given, dict) else path


def _without_empty(raw: dict[str, Any]) -> dict[str, Any]:
    """Return `raw` without sections whose keys are all commented out."""
    return {key: value for key, value in raw.items() if value is not None}


def _veil(raw: dict[str, Any], source: str) -> Veil:
    """Return what hides the secrets of a config that is not checked yet; texts and schemas are the user's own words."""
    try:
        return Veil(concealed({key: value for key, value in raw.items() if key not in SHOWN}))
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply, or contains itself") from None


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
        raise ConfigError(f"{source}: runner_args.{moved}: repeats what speculation says; keep only one of them")
    raw |= {"runner_args": rest, "speculation": speculation}
    return [f"{source}: runner_args.{note}" for note in notes]


def _check(config: RunConfig) -> None:
    """Check what depends on several keys."""
    if config.retrieval:
        _check_retrieval(config.retrieval)
        if config.prompt.source not in ("auto", "query"):
            raise ConfigError(
                f'prompt.source: "{config.prompt.source}": retrieval only fills in contexts for `query` records; '
                "set prompt.source: query, or remove retrieval"
            )
    spec = config.speculation
    for runner in config.runners():
        runners.module(runner)
        check_method(runner, spec.method)
    if config.model is None and config.runner != "fake":
        raise ConfigError('model: missing; give a hub id, a folder, a .gguf file or "demo"')
    _check_method(spec)
    if spec.ngram_min and spec.ngram_max and spec.ngram_min > spec.ngram_max:
        raise ConfigError(f"speculation.ngram_min: {spec.ngram_min} is greater than ngram_max ({spec.ngram_max})")


def _check_method(spec: SpeculationConfig) -> None:
    """Check the section's keys against what the method needs and takes."""
    method = method_named(spec.method)
    for key in method.needs:
        if getattr(spec, key) in (None, ""):
            raise ConfigError(f'speculation.{key}: missing; method "{spec.method}" needs {NEEDED[key]}')
    draft = spec.draft_model or spec.draft_tokenizer
    if draft and not (method.takes_draft or method.some_models):
        raise ConfigError(
            f'speculation.draft_model: "{draft}" has no effect with method "{spec.method}"; set speculation.method: '
            "draft_model, or remove the draft"
        )
    if spec.speculative_config is not None and "speculative_config" not in method.needs:
        raise ConfigError("speculation.speculative_config: only valid with method: speculative_config (runner vllm)")


def _check_retrieval(retrieval: RetrievalConfig) -> None:
    if retrieval.chunk_overlap > retrieval.chunk_size // 2:
        raise ConfigError(
            f"retrieval.chunk_overlap: {retrieval.chunk_overlap} exceeds half of chunk_size ({retrieval.chunk_size})"
        )
    for key, value in retrieval.storage_options.items():
        if names_secret(key) and not (isinstance(value, Secret) and value.is_reference):
            raise ConfigError(
                f"retrieval.storage_options.{key}: do not put an object store's secrets into a config; set "
                f"{key.upper()} in the environment, or write ${{NAME}} here, where NAME is an environment variable"
            )


def _check_references(value: Any, source: str) -> None:
    """Raise ConfigError for an environment variable that the config names but that is not set."""
    for path, secret in secrets_in(value):
        try:
            secret.reveal()
        except ConfigError as error:
            raise ConfigError(f"{source}: {path}: {error}") from None


def _with_template_text(config: RunConfig, source: str) -> RunConfig:
    """Replace the name of a template file by its text, so that the resolved config needs no other file."""
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


def _with_structured(config: RunConfig, source: str) -> RunConfig:
    """Replace the names of schema and grammar files by their text, and see that the form can be compiled."""
    if config.structured is None:
        return config
    from ragspec.config.structured import with_files

    return config.model_copy(update={"structured": with_files(config.structured, source)})
