"""The flags that set a key of the config, each described once, and what makes a command take them.

    >>> @with_settings("model", "temperature")
    ... def command(settings: list[str], ...): ...

A flag becomes the override that `--set` takes ("sampling.temperature=0.7"), so the config's own checks apply to it and
speak of its key. Nothing heavy is imported.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

import typer

from ragspec.cli.completion import (
    complete_dtypes,
    complete_includes,
    complete_methods,
    complete_models,
    complete_runners,
)

MODEL, PASSAGES, ANSWERS, DRAFTS, RUN = "Model", "Passages", "Answers", "Speculation", "Running"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, the key that it sets, and its help. letter: its short form. many: it may be repeated.

    pairs: its values are FIELD=NAME, keys under `key`. switch: it takes no value and means true.
    """

    key: str
    metavar: str
    help: str
    panel: str
    letter: str = ""
    many: bool = False
    pairs: bool = False
    switch: bool = False
    complete: Callable[[str], list[str]] | None = None


FLAGS = {
    "model": Flag("model", "MODEL", "Hub id, folder, .gguf file, or demo.", MODEL, complete=complete_models),
    "runner": Flag("runner", "RUNNER", "huggingface, vllm, or auto (the default).", MODEL, complete=complete_runners),
    "dtype": Flag(
        "runner_args.dtype", "DTYPE", "Data type, such as float32 or bfloat16.", MODEL, complete=complete_dtypes
    ),
    "device": Flag("runner_args.device", "DEVICE", "cuda, mps, cpu, or auto (the default).", MODEL),
    "revision": Flag("runner_args.revision", "REVISION", "The model's revision on the hub.", MODEL),
    "trust_remote_code": Flag(
        "runner_args.trust_remote_code", "", "Run code that comes with the model.", MODEL, switch=True
    ),
    "index": Flag("retrieval.index", "DIR", "Retrieve passages from this index (see ragspec index).", PASSAGES),
    "top_k": Flag("retrieval.top_k", "N", "Passages per question from the index (5).", PASSAGES, "-k"),
    "columns": Flag(
        "input.columns",
        "FIELD=NAME",
        "The input's name for a field: query=question. Repeatable.",
        PASSAGES,
        many=True,
        pairs=True,
    ),
    "system": Flag("prompt.system", "TEXT", "System prompt.", ANSWERS),
    "template": Flag(
        "prompt.template", "FILE|TEXT", "Jinja2 template of the user message; 'citations' asks for citations.", ANSWERS
    ),
    "schema": Flag("structured.json_schema", "FILE", "JSON schema for every answer.", ANSWERS),
    "temperature": Flag("sampling.temperature", "NUMBER", "0 is greedy (the default); 1 samples.", ANSWERS),
    "top_p": Flag(
        "sampling.top_p", "NUMBER", "Sample from the likeliest tokens that together have this probability.", ANSWERS
    ),
    "seed": Flag("sampling.seed", "N", "Seed for sampling.", ANSWERS),
    "stop": Flag("sampling.stop", "TEXT", "Text that ends an answer; repeatable.", ANSWERS, many=True),
    "include": Flag(
        "output.include",
        "WHAT",
        "Also write query (the question) or contexts (the passages); repeatable.",
        ANSWERS,
        many=True,
        complete=complete_includes,
    ),
    "method": Flag(
        "speculation.method",
        "METHOD",
        "Source of drafts (context by default); none turns them off.",
        DRAFTS,
        "-m",
        complete=complete_methods,
    ),
    "draft_model": Flag(
        "speculation.draft_model", "MODEL", "Draft model, for --method draft_model.", DRAFTS, complete=complete_models
    ),
    "draft_tokens": Flag(
        "speculation.num_tokens", "N", "Draft length in tokens; by default, whatever pays off.", DRAFTS
    ),
    "isolate": Flag(
        "speculation.isolate", "", "Draft from a record's own text only, not from other records.", DRAFTS, switch=True
    ),
    "batch_size": Flag("runner_args.batch_size", "N", "Batch size; by default, the fastest.", RUN),
}
WHAT = ("model", "dtype", "device", "index", "top_k", "columns", "system", "template", "schema", "temperature")
METHOD = "context"  # of a command without a config


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command these flags; it gets them as `settings`, a list of overrides."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.name != "settings"]
        flags = [_parameter(name, FLAGS[name]) for name in names]

        @wraps(command)
        def with_flags(**given: Any) -> None:
            command(settings=_overrides({name: given.pop(name) for name in names}), **given)

        # help shows panels in this order: what nearly every run needs comes first
        ordered = [*(each for each in own if not _panel(each)), *flags, *(each for each in own if _panel(each))]
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in ordered]
        with_flags.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {each.name: each.annotation for each in parameters}
        del with_flags.__wrapped__  # typer would read the command's own signature
        return with_flags

    return decorate


def _panel(parameter: inspect.Parameter) -> str:
    """Return the panel of the help that a command's own option is in, "" for the first."""
    about = getattr(parameter.annotation, "__metadata__", ())
    return next((found for each in about if (found := getattr(each, "rich_help_panel", None))), "")


def method_for(settings: Sequence[str], *, config: bool) -> list[str]:
    """Return the override that chooses a method where neither a config nor a flag does.

    config: a config is given, whose method counts.
    """
    from ragspec.speculation.methods import FAKE

    given = dict(each.partition("=")[::2] for each in settings)
    if config or any(_says_method(key) for key in given):
        return []
    if "speculation.draft_model" in given:
        return ["speculation.method=draft_model"]
    return [] if given.get("runner") == FAKE else [f"speculation.method={METHOD}"]


def _says_method(key: str) -> bool:
    """Return whether a config's key decides where drafts come from; vLLM's own arguments do, too."""
    from ragspec.config.translate.vllm import speculates

    section, _, argument = key.partition(".")
    ours = key in ("speculation", "speculation.method")
    return ours or (section == "runner_args" and speculates(argument.partition(".")[0]))


def _parameter(name: str, flag: Flag) -> inspect.Parameter:
    """Return a flag as typer reads it."""
    names = [f"--{name.replace('_', '-')}", *([flag.letter] if flag.letter else [])]
    option = typer.Option(
        *names,
        metavar=flag.metavar or None,
        help=flag.help,
        rich_help_panel=flag.panel,
        autocompletion=flag.complete,
    )
    kind: Any = bool if flag.switch else list[str] | None if flag.many else str | None
    default = False if flag.switch else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _overrides(given: dict[str, Any]) -> list[str]:
    """Return flags' values as overrides."""
    found: list[str] = []
    for name, value in given.items():
        flag = FLAGS[name]
        if value is None or value is False:
            continue
        if flag.pairs:
            found += pairs_of(name, flag.key, value)
        elif flag.switch:
            found.append(f"{flag.key}=true")
        else:
            found.append(f"{flag.key}={json.dumps(value, ensure_ascii=False) if flag.many else value}")
    return found


def pairs_of(flag: str, key: str, given: Sequence[str]) -> list[str]:
    """Return the overrides that a flag's FIELD=NAME values mean under `key`. Raises ConfigError.

    Fields come before fields inside them (`contexts` before `contexts.text`), so their order does not matter.
    """
    from ragspec.cli.options import refuse_two_values
    from ragspec.errors import ConfigError

    for each in given:
        field, _, name = each.partition("=")
        if not (field and name):
            raise ConfigError(f'--{flag}: "{each}" is not FIELD=NAME, for instance id=qid')
    refuse_two_values(flag, given)
    ordered = sorted(given, key=lambda each: each.partition("=")[0].count("."))
    return [f"{key}.{each}" for each in ordered]
