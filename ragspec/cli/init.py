"""`ragspec init`: a config that runs, from a few questions or from flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ragspec.cli.flags import with_settings
from ragspec.cli.options import (
    Debug,
    InputOrStdin,
    MaxNewTokens,
    Plugin,
    Set,
    overrides,
    set_debug,
    settings_of,
    with_config,
)


@with_settings(
    *("model", "runner", "index", "top_k", "columns", "system", "template", "schema", "temperature", "include"),
    *("method", "draft_model", "batch_size"),
)
def init(
    settings: list[str],
    path: Annotated[Path, typer.Argument(metavar="CONFIG|-", help="Config file to write.")] = Path("ragspec.yaml"),
    input: InputOrStdin = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="PATH|-", help="Where answers go (answers.jsonl).")
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing config.")] = False,
    plugin: Plugin = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Write a commented config from a few questions or from flags."""
    from ragspec.cli.tables import stderr
    from ragspec.config.written import save_config
    from ragspec.errors import ConfigError

    set_debug(debug)
    if path.exists() and not force:
        raise ConfigError(f"{path}: already exists; choose another name, or use --force to replace it")
    settings = [*overrides(None, max_new_tokens), *settings]
    if not any(each.startswith(("model=", "runner=fake")) for each in [*settings, *(override or ())]):
        settings.append(f"model={_asked('model', 'Model (hub id, folder, .gguf file, or demo)', 'demo')}")
    input = input or _asked("input", "File of questions", "questions.jsonl")
    output = output or (_asked("output", "File for the answers", "answers.jsonl") if _is_asked() else "answers.jsonl")
    config, notes, values = settings_of(None, settings, override, input=input, output=output)
    flags = with_config(path, plugin)
    why = [f"Run it: ragspec generate {flags}", f"Check it first: ragspec doctor {flags}"]
    save_config(config, values, path, why, force=force)
    console = stderr()
    for note in notes:
        console.print(f"note: {note}", markup=False, style="yellow")
    if input != "-" and "://" not in input and not Path(input).exists():
        console.print(f"note: {input} does not exist yet", markup=False, style="yellow")
    if str(path) != "-":
        console.print(f"config in {path}; next: ragspec generate {flags}", markup=False)


def _is_asked() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _asked(flag: str, question: str, default: str) -> str:
    """Return the answer to a question. Raises ConfigError without a terminal."""
    from ragspec.errors import ConfigError

    if not _is_asked():
        raise ConfigError(f"--{flag}: missing, and there is no terminal to prompt on")
    return str(typer.prompt(question, default=default, err=True))
