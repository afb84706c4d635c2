"""Writes what the docs take from the code: `python docs/generate.py`. A test checks that it was run.

docs/reference/commands: each page holds the --help text of its command between two markers. docs/reference/config.md:
the tables of keys and methods; docs/reference/config.schema.json: the same as a JSON schema. docs/lab/performance.md:
the tables of benchmarks/results/; docs/results.svg: a chart of them.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

DOCS = Path(__file__).resolve().parent
REFERENCE = DOCS / "reference"
LAB = DOCS / "lab"
KEYS = "| key | default | meaning |\n|---|---|---|\n"
METHOD_KEYS = "| method | what drafts | runners | needs |\n|---|---|---|---|\n"
BLOCK = re.compile(r"(<!-- help -->\n```text\n).*?(\n```\n<!-- /help -->)", re.DOTALL)


def help_of(command: str) -> str:
    """Return what `ragspec COMMAND --help` prints, 100 columns wide."""
    environment = {**os.environ, "COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1", "TERM": "dumb"}
    environment.pop("FORCE_COLOR", None)
    done = subprocess.run(
        [sys.executable, "-m", "ragspec", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def page_of(path: Path) -> str:
    """Return a command's page with the help of today."""
    text = path.read_text(encoding="utf-8")
    assert BLOCK.search(text), f"{path} has no help block"
    return BLOCK.sub(lambda found: found[1] + help_of(path.stem) + found[2], text)


def schema() -> str:
    """Return the config's schema as text."""
    from ragspec.config.schema import config_schema

    return json.dumps(config_schema(), indent=1, sort_keys=True) + "\n"


def config_page() -> str:
    """Return docs/reference/config.md with the tables of today: keys, methods, runner_args."""
    from ragspec import runners
    from ragspec.config.run import RunConfig
    from ragspec.runners.vllm.config import TRIED
    from ragspec.speculation.methods import METHODS

    text = (REFERENCE / "config.md").read_text(encoding="utf-8")
    text = _put(text, "keys", KEYS + "\n".join(_key_rows(RunConfig)))
    methods = [
        f"| `{word}` | {method.summary} | {', '.join(name for name in method.runners if name != 'fake')} | "
        f"{', '.join(f'`{key}`' for key in method.needs)} |"
        for word, method in METHODS.items()
    ]
    text = _put(text, "methods", METHOD_KEYS + "\n".join(methods))
    for name in ("huggingface", "vllm", "fake"):
        text = _put(text, f"args {name}", KEYS + "\n".join(_key_rows(runners.module(name).Args)))
    versions = [f"| {version} | {result} |" for version, result in TRIED.items()]
    return _put(text, "vllm versions", "| version | result |\n|---|---|\n" + "\n".join(versions))


def performance_page() -> str:
    """Return docs/lab/performance.md with the tables of benchmarks/results/."""
    sys.path.insert(0, str(LAB))
    from results import tables

    return _put((LAB / "performance.md").read_text(encoding="utf-8"), "results", "\n" + tables())


def results_chart() -> str:
    """Return docs/results.svg, drawn from benchmarks/results/ and the log."""
    sys.path.insert(0, str(LAB))
    from chart import chart

    return chart()


def _key_rows(model: Any, prefix: str = "") -> Iterator[str]:
    """Yield a table row for every key of a section and of those in it."""
    for name, field in model.model_fields.items():
        kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in get_args(field.annotation)]
        inner = next((kind for kind in (field.annotation, *kinds) if _is_section(kind)), None)
        if inner is not None:
            yield f"| **{prefix}{name}** | | {' '.join(inner.__doc__.split())} |"
            yield from _key_rows(inner, f"{prefix}{name}.")
        elif field.description:
            meaning = " ".join(field.description.split()).replace("|", "\\|")
            yield f"| `{prefix}{name}` | {_default(field)} | {meaning} |"


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _default(field: FieldInfo) -> str:
    if field.is_required() or field.default in (None, ""):
        return ""
    return f"`{json.dumps(field.default).strip(chr(34))}`"


def _put(text: str, name: str, table: str) -> str:
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    assert block.search(text), f"a page has no block {name}"
    return block.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


def main() -> None:
    """Write all."""
    for path in sorted((REFERENCE / "commands").glob("*.md")):
        path.write_text(page_of(path), encoding="utf-8")
    (LAB / "performance.md").write_text(performance_page(), encoding="utf-8")
    (DOCS / "results.svg").write_text(results_chart(), encoding="utf-8")
    (REFERENCE / "config.md").write_text(config_page(), encoding="utf-8")
    (REFERENCE / "config.schema.json").write_text(schema(), encoding="utf-8")


if __name__ == "__main__":
    main()
