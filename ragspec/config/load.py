"""Load a config: read the YAML, translate other tools' keys, apply `--set`, check.

>>> raw = {}; override(raw, "output=OUT #1.jsonl", {}); override(raw, "sampling.seed=1", {}); raw
{'output': 'OUT #1.jsonl', 'sampling': {'seed': 1}}

Unknown keys are errors with a suggestion; every message names file, key, value and what is allowed. Limit: only the
config's text is checked here; `Runner.check` checks models and tokenizers.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ragspec import runners
from ragspec.config.redaction import Redactor, Secret, names_secret, redacted, secrets_in
from ragspec.config.run import CHOICES, RunConfig
from ragspec.config.sections import RetrievalConfig, SpeculationConfig, validate
from ragspec.config.translate.autogluon import is_autogluon, translate
from ragspec.config.translate.vllm import modernise
from ragspec.config.yaml_file import RepeatedKey, parse_flow, parse_scalar, parse_texts, parse_yaml, read_yaml
from ragspec.errors import ConfigError
from ragspec.speculation.methods import AUTO, check_method, method_named

SECTIONS = ("input", "output", "contexts")  # a path alone may replace these sections


def override(raw: dict[str, Any], given: str, later: Mapping[str, Any]) -> None:
    """Set `given`, "KEY.PATH=VALUE", in a config's raw values.

    The key's type decides how the value is read. A text key takes the value literally: no comments, quotes, numbers or
    nulls. Other keys take YAML. Keys that take both read `[...]` and `{...}` as YAML and anything else literally. Keys
    of free dictionaries (`runner_args.*` of vllm, `model_args`) take YAML scalars, in which `#` begins no comment.

    Args:
        raw: the config's values, changed in place.
        given: the override.
        later: all overrides by key, to find `runner`.

    Raises:
        ConfigError: the override is malformed or its parent is not a mapping.
    """
    key, equals, value = given.partition("=")
    if not equals or not key:
        raise ConfigError(f'--set: "{given}" is not KEY.PATH=VALUE, for instance sampling.temperature=0.7')
    *parents, last = key.split(".")
    place = raw
    for parent in parents:
        if place.get(parent) is None:
            place[parent] = {}
        elif parent in SECTIONS and isinstance(place[parent], str | list):
            place[parent] = {"path": place[parent]}
        place = place[parent]
        if not isinstance(place, dict):
            raise ConfigError(f'--set: "{key}": "{parent}" is a value and has no keys')
    runner = later.get("runner", raw.get("runner"))
    place[last] = value_of(value, _type_of([*parents, last], runner), f"--set {key}")


def value_of(text: str, kind: Any, where: str) -> Any:
    """Return `text` read as a key of type `kind`. where: begins messages. Raises ConfigError."""
    forms = list(_forms(kind))
    if Any in forms:
        return parse_flow(text, where) if _is_flow(text) else parse_scalar(text)
    if all(form in (str, type(None)) or _is_word(form) for form in forms):
        return text
    lists = next((form for form in forms if form is list or get_origin(form) is list), None)
    mapping = any(form is dict or get_origin(form) is dict or _is_section(form) for form in forms)
    if lists is not None and text.strip()[:1] == "[" and _holds_texts(lists):
        return _or_text(parse_texts, text, where, forms)
    if str not in forms:
        return parse_yaml(text, where) if mapping or lists is not None else parse_scalar(text)
    if (lists is not None and text.strip()[:1] == "[") or (mapping and text.strip()[:1] == "{"):
        return _or_text(parse_flow, text, where, forms)
    scalar = parse_scalar(text)
    return scalar if type(scalar) in (bool, int, float) and type(scalar) in forms else text


def _or_text(parse: Any, text: str, where: str, forms: list[Any]) -> Any:
    """Return the YAML value of a text, or the text if it is invalid YAML and the key takes text ("[a]b.jsonl")."""
    try:
        return parse(text, where)
    except ConfigError:
        if str in forms:
            return text
        raise


def _is_flow(text: str) -> bool:
    return text.strip()[:1] in ("[", "{")


def _type_of(keys: list[str], runner: Any) -> Any:
    """Return the type of a key, Any if no model defines it."""
    if keys[0] == "runner_args" and len(keys) > 1:
        names = CHOICES if runner in (None, AUTO) else (runner,)
        found = (_nested_type(runners.module(name).Args, keys[1:]) for name in names if name in runners.names())
        return next((kind for kind in found if kind is not Any), Any)
    return _nested_type(RunConfig, keys)


def _nested_type(kind: Any, keys: list[str]) -> Any:
    for key in keys:
        forms = list(_forms(kind))
        section = next((form for form in forms if _is_section(form)), None)
        free = next((form for form in forms if get_origin(form) is dict), None)
        if section is not None and key in section.model_fields:
            field = section.model_fields[key]
            kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        elif section is None and free is not None:
            kind = get_args(free)[1]
        else:
            return Any
    return kind


def _forms(kind: Any) -> Iterator[Any]:
    """Yield the members of a union type; a Literal yields one `Literal[word]` per word."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *about = get_args(kind)
        written = [getattr(each, "json_schema_input_type", PydanticUndefined) for each in about]
        yield from _forms(next((each for each in reversed(written) if each is not PydanticUndefined), inner))
    elif origin in (Union, types.UnionType):
        for each in get_args(kind):
            yield from _forms(each)
    elif origin is Literal:
        yield from (Literal[value] if isinstance(value, str) else type(value) for value in get_args(kind))
    else:
        yield kind


def _is_word(form: Any) -> bool:
    return get_origin(form) is Literal


def _is_section(form: Any) -> bool:
    return isinstance(form, type) and issubclass(form, BaseModel)


def _holds_texts(kind: Any) -> bool:
    """Return whether the items of a list are texts."""
    return all(form is str or _is_word(form) for item in get_args(kind) for form in _forms(item))


# -- loading and checking --------------------------------------------------------------------------

NEEDED = {
    "draft_model": "the name of a draft model",
    "early_exit_layer": "the layer to draft from, for instance 4",
    "speculative_config": "what vLLM is to be told",
}
INDEXED = ("corpus", "embedding_model")  # keys that an existing index was built with
SHOWN = {"prompt", "sampling", "structured"}  # sections without secrets, whatever their keys are called
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")


def load_config(path: str, overrides: Sequence[str] = (), **direct: Any) -> tuple[RunConfig, list[str]]:
    """Return the config in file `path`, and notes on translated or ignored keys.

    Args:
        path: a YAML file.
        overrides: "key.path=value" each (`--set`).
        direct: top-level keys; those that are not None override everything else.

    Raises:
        ConfigError: the file or a value is invalid.
    """
    raw, read_notes = read_config(path)
    config, notes = config_of(raw, path, overrides, **direct)
    return config, read_notes + notes


def read_config(path: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values in file `path`, in ragspec's or AutoGluon-RAG's keys, and notes. Raises ConfigError."""
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
    """Return what `load_config` does for a file's values `raw`, which may be changed. source: begins messages."""
    values, notes = merged(raw, source, overrides, **direct)
    config = redacted_config(values, source)
    return config, [config.redactor()(note) for note in notes]


def redacted_config(values: dict[str, Any], source: str) -> RunConfig:
    """Return `build_config` of values as `merged` returns them; errors show no secret that is among them."""
    with _raw_redactor(values, source).over_errors():
        return build_config(values, source)


def merged(
    raw: dict[str, Any], source: str, overrides: Sequence[str] = (), **direct: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return a file's values in ragspec's keys, with overrides, as `build_config` takes them, and notes."""
    given = [key for key, value in direct.items() if value is not None]
    with _raw_redactor(raw, source).over_errors():
        raw, notes = _overridden(raw, source, overrides, given)
        notes += _modernise(raw, source)
        raw |= {key: _with_path(raw.get(key), value) for key, value in direct.items() if value is not None}
    return _without_empty(raw), notes


def build_config(raw: dict[str, Any], source: str = "config") -> RunConfig:
    """Return `raw` as a checked RunConfig. source: begins messages. Raises ConfigError."""
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
    """Return the retrieval section of config `path`, if given, overridden by `direct`, and notes.

    builds: an index is to be built rather than searched. Raises ConfigError, also for other sections.
    """
    source = path or "command line"
    raw, read_notes = read_config(path) if path is not None else ({}, [])
    given = [f"retrieval.{key}" for key in (*direct, *(() if builds else INDEXED))]
    with _raw_redactor(raw, source).over_errors():
        raw, notes = _overridden(raw, source, overrides, given, only_retrieval=True)
        section = raw.get("retrieval") or {}
        if isinstance(section, dict):
            raw["retrieval"] = section = {**section, **direct}
            if "index" not in section:
                raise ConfigError(f"{source}: retrieval.index: missing; name the folder of the index")
        config = cast(RunConfig, validate(RunConfig, _without_empty(raw), source)).retrieval
        assert config is not None
        _check_retrieval(config)
        _check_references({"retrieval": config.model_dump()}, source)
    return config, read_notes + notes


def _overridden(
    raw: dict[str, Any], source: str, overrides: Sequence[str], given: Sequence[str], *, only_retrieval: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return `raw` in ragspec's keys with `--set` applied, and notes on translated or ignored keys.

    given: further keys that are set later.
    """
    notes: list[str] = []
    if is_autogluon(raw):
        keys = {*given, *(each.partition("=")[0] for each in overrides)}
        raw, notes = translate(raw, source, keys, only_retrieval=only_retrieval)
    later = dict(each.partition("=")[::2] for each in overrides)
    for each in overrides:
        override(raw, each, later)
    return raw, notes


def _with_path(given: Any, path: Any) -> Any:
    """Return an input or output section with its path replaced; `path` alone if the section has no other keys."""
    return {**given, "path": path} if isinstance(given, dict) else path


def _without_empty(raw: dict[str, Any]) -> dict[str, Any]:
    """Return `raw` without sections whose keys are all commented out."""
    return {key: value for key, value in raw.items() if value is not None}


def _raw_redactor(raw: dict[str, Any], source: str) -> Redactor:
    """Return a Redactor for an unchecked config. Prompts, sampling and schemas may appear in messages."""
    try:
        return Redactor(redacted({key: value for key, value in raw.items() if key not in SHOWN}))
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply, or contains itself") from None


def _modernise(raw: dict[str, Any], source: str) -> list[str]:
    """Move vLLM's speculation arguments, of 2024 and of today, from `runner_args` to `speculation`."""
    args = raw.get("runner_args")
    if raw.get("runner") != "vllm" or not isinstance(args, dict):
        return []
    rest, speculation, notes = modernise(args)
    if not notes and speculation == {"method": "none"}:
        return []
    if raw.get("speculation"):
        moved = ", ".join(key for key in args if key not in rest)
        raise ConfigError(f"{source}: runner_args.{moved}: duplicates the speculation section; keep only one of them")
    raw |= {"runner_args": rest, "speculation": speculation}
    return [f"{source}: runner_args.{note}" for note in notes]


def _check(config: RunConfig) -> None:
    """Check rules that involve several keys."""
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
    """Check the section's keys against what the method requires and accepts."""
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
    default = RetrievalConfig.model_fields["chunk_overlap"].default  # it gives way, also in a config that is passed on
    if retrieval.chunk_overlap > retrieval.chunk_size // 2 and retrieval.chunk_overlap != default:
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
    """Raise ConfigError for an environment variable that the config references but that is not set."""
    for path, secret in secrets_in(value):
        try:
            secret.reveal()
        except ConfigError as error:
            raise ConfigError(f"{source}: {path}: {error}") from None


def _with_template_text(config: RunConfig, source: str) -> RunConfig:
    """Replace the name of a template file with its text, so that the resolved config needs no other file."""
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
    """Replace the names of schema and grammar files with their text, and check that the form compiles."""
    if config.structured is None:
        return config
    from ragspec.config.structured import with_files

    return config.model_copy(update={"structured": with_files(config.structured, source)})
