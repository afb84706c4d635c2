"""The config as a JSON schema, for editors: completion and checks while a YAML file is written."""

from __future__ import annotations

from typing import Any

from ragspec import runners
from ragspec.config.run import RunConfig
from ragspec.speculation.methods import AUTO, HF, methods_of

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def config_schema() -> dict[str, Any]:
    """Return the schema of a ragspec config; `runner_args` and methods depend on the runner."""
    schema = RunConfig.model_json_schema()
    modules = {name: runners.module(name) for name in runners.names()}
    schema["properties"]["runner"]["enum"] = [AUTO, *modules]
    choices: list[dict[str, Any]] = []
    for name, module in modules.items():
        args = module.Args.model_json_schema(ref_template=f"#/$defs/{name}_{{model}}")
        for inner, definition in args.pop("$defs", {}).items():
            schema["$defs"][f"{name}_{inner}"] = definition
        methods = {"properties": {"method": {"enum": list(methods_of(name))}}}
        condition: dict[str, Any] = {"properties": {"runner": {"const": name}}}
        condition["required"] = ["runner"]
        choices.append({"if": condition, "then": {"properties": {"runner_args": args, "speculation": methods}}})
        if name == HF:
            may = {"runner": {"const": AUTO}, "speculation": methods}
            choices.append({"if": {"properties": may}, "then": {"properties": {"runner_args": args}}})
    return {"$schema": DRAFT, **schema, "title": "ragspec config", "allOf": choices}
