"""Writes what the docs take from the code: `python docs/generate.py`. A test checks that it was run.

docs/reference/commands: each page holds the --help text of its command between two markers. docs/reference/config.md:
the tables of keys and methods; docs/reference/config.schema.json: the same as a JSON schema. docs/reference/python.md:
the docstrings of the public API. docs/lab/performance.md:
the tables of benchmarks/results/; docs/results.svg: a chart of them. docs/lab/example-report/report.html: the report of
the results beside it; docs/answer.svg: an answer as the terminal shows it.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

DOCS = Path(__file__).resolve().parent
REFERENCE = DOCS / "reference"
LAB = DOCS / "lab"
EXAMPLE = LAB / "example-report"
KEYS = "| key | default | meaning |\n|---|---|---|\n"
METHOD_KEYS = "| method | what drafts | runners | needs |\n|---|---|---|---|\n"
BLOCK = re.compile(r"(<!-- help -->\n```text\n).*?(\n```\n<!-- /help -->)", re.DOTALL)

SECTIONS = ("Args", "Attributes", "Returns", "Raises")
API = [  # the sections of docs/reference/python.md: together, all public names
    ("Running", ["load_config", "generate", "Pipeline", "RunConfig", "RunSummary"]),
    ("Drafters", ["register_drafter", "Drafter", "RowDrafter", "Draft", "DrafterSettings"]),
    ("Errors", ["RagspecError", "ConfigError", "ModelError"]),
]
FRAMES = ["results", "benchmark", "evaluate", "index"]  # of ragspec.frames
MADE_BY_RAGSPEC = ("RunSummary", "DrafterSettings")  # ragspec makes their instances
INTERNAL = ("add_to",)
PYTHON_HEAD = """\
# Python API

```python
import ragspec

config = ragspec.load_config({"model": "demo", "speculation": {"method": "context"}})
with ragspec.Pipeline(config) as pipeline:  # loads the model
    for answer in pipeline.answers([{"query": "Who built it?", "contexts": ["Ann Smith built it in 1871."]}]):
        print(answer["output"])
```

The names on this page are the public API; everything else may change. `import ragspec` is cheap: torch and transformers
are imported when they are first needed. The package is typed (`py.typed`). [examples/](../../examples) has complete
scripts.

This page is generated from the docstrings by `python docs/generate.py`.
"""
FRAMES_HEAD = """\
`from ragspec.frames import benchmark, evaluate, index, results`: what the commands of these names do, as pandas frames.
They need `pip install "ragspec[notebook]"`.
"""


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
    from ragspec.config.run import config_schema

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


def python_page() -> str:
    """Return docs/reference/python.md: signatures and docstrings of the public API."""
    import ragspec
    from ragspec import frames
    from ragspec.speculation.methods import DrafterSettings

    public = {name: getattr(ragspec, name) for name in ragspec.__all__} | {"DrafterSettings": DrafterSettings}
    assert set(public) == {name for _, names in API for name in names}, "API in docs/generate.py lists the public names"
    parts = [PYTHON_HEAD]
    for title, names in API:
        parts += [f"## {title}\n", *(_entry(name, public[name]) for name in names)]
    parts += [f"## Frames\n\n{FRAMES_HEAD}", *(_entry(name, getattr(frames, name)) for name in FRAMES)]
    return "\n".join(parts)


def _entry(name: str, thing: Any) -> str:
    """Return the section of a function or class, with its public methods."""
    if not inspect.isclass(thing):
        return f"### `{name}`\n\n{_code(name, thing)}\n{_prose(thing)}"
    if issubclass(thing, BaseModel):
        made = "Made by `load_config`. Its fields are the keys of the [config](config.md), and it is frozen.\n"
        return f"### `{name}`\n\n{_prose(thing)}\n{made}"
    shown = [f"### `{name}`\n"]
    if issubclass(thing, Exception):
        shown.append(f"```text\nclass {name}({', '.join(base.__name__ for base in thing.__bases__)})\n```\n")
    elif not getattr(thing, "_is_protocol", False) and name not in MADE_BY_RAGSPEC:
        shown.append(_code(name, thing.__init__, bound=True))
    shown.append(_prose(thing))
    for method, value in vars(thing).items():
        if method.startswith("_") or method in INTERNAL:
            continue
        if inspect.isfunction(value):
            shown.append(f"#### `{name}.{method}`\n\n{_code(method, value, bound=True)}\n{_prose(value)}")
        elif isinstance(value, property):
            kind = inspect.formatannotation(inspect.signature(value.fget).return_annotation).strip("'")
            shown.append(f"#### `{name}.{method}`\n\nProperty, `{kind}`. {_prose(value)}")
    return "\n".join(shown)


def _code(name: str, function: Any, *, bound: bool = False) -> str:
    """Return a signature as a block of Python. bound: leave out `self`."""
    signature = inspect.signature(function)
    shown: list[str] = []
    keyword_only = False
    for parameter in [*signature.parameters.values()][bound:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            shown.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        kind = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {_value(parameter.default)}"
        shown.append(f"{stars}{parameter.name}{kind}{default}")
    result = signature.return_annotation
    end = "" if result in (signature.empty, "None", None) else f" -> {_annotation(result)}"
    line = f"{name}({', '.join(shown)}){end}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in shown) + f"){end}"
    return f"```text\n{line}\n```\n"


def _annotation(kind: Any) -> str:
    return kind if isinstance(kind, str) else inspect.formatannotation(kind)


def _value(default: Any) -> str:
    """Return a default as it is shown; of an object without a short form, "..."."""
    return "..." if callable(default) or " at 0x" in repr(default) or "<factory>" in repr(default) else repr(default)


def _prose(thing: Any) -> str:
    """Return a docstring in Google's style as Markdown."""
    lines = inspect.cleandoc(thing.__doc__ or "").splitlines()
    text: list[str] = []
    section = ""
    for line in lines:
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            section = line
            text += [f"**{line.rstrip(':')}**", ""]
        elif section and line.startswith("    "):
            item = re.match(r"    ([\w, ]+): (.*)", line)
            if section == "Returns:":
                text.append(line.strip())
            elif item and not line.startswith("     "):
                names = ", ".join(f"`{name}`" for name in item[1].split(", "))
                text.append(f"- {names}: {item[2]}")
            else:
                text.append(f"  {line.strip()}")
        else:
            section = section if not line else ""
            text.append(line)
    return _filled("\n".join(text)) + "\n"


def _filled(text: str) -> str:
    """Return Markdown with its paragraphs and items wrapped."""
    blocks = re.split(r"\n\n|\n(?=- )", text)
    wrapped = [
        block
        if block.startswith("    ")
        else textwrap.fill(
            " ".join(block.split()),
            120,
            subsequent_indent="  " * block.startswith("- "),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for block in blocks
    ]
    return "".join(
        ("" if not i else "\n" if block.startswith("- ") and wrapped[i - 1].startswith("- ") else "\n\n") + block
        for i, block in enumerate(wrapped)
    )


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


def example_report() -> str:
    """Return docs/lab/example-report/report.html, drawn from the results beside it."""
    from ragspec.benchmark.results import read_results
    from ragspec.report.page import render

    return render(read_results(EXAMPLE))


def picture() -> str:
    """Return docs/answer.svg: an answer of the demo with its passages, as the terminal shows it."""
    import io

    from rich.console import Console

    from ragspec.cli.answer_view import AnswerView

    line = json.loads((EXAMPLE / "answer.json").read_text(encoding="utf-8"))
    screen = Console(file=io.StringIO(), record=True, force_terminal=True, width=88, color_system="truecolor")
    AnswerView(screen, Console(file=io.StringIO(), width=88)).show(line)
    AnswerView(screen, screen).show_passages(line)
    drawn = screen.export_svg(title="make demo", unique_id="answer")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # no fonts from elsewhere


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
    (REFERENCE / "python.md").write_text(python_page(), encoding="utf-8")
    (DOCS / "results.svg").write_text(results_chart(), encoding="utf-8")
    (REFERENCE / "config.md").write_text(config_page(), encoding="utf-8")
    (REFERENCE / "config.schema.json").write_text(schema(), encoding="utf-8")
    (EXAMPLE / "report.html").write_text(example_report(), encoding="utf-8")
    (DOCS / "answer.svg").write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
