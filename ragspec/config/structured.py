"""The `structured` section of a config: the required form of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ragspec.config.sections import Section
from ragspec.errors import ConfigError, RecordError
from ragspec.json_text import JSONDecodeError, loads
from ragspec.structured.form import Form
from ragspec.structured.grammars import problem_of
from ragspec.structured.schema import CARRIERS, SOME, is_schema, unwrapped

GRAMMAR_SUFFIXES = (".lark", ".gbnf", ".ebnf")
GUIDED = {  # vLLM's former names
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
Choice = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class StructuredConfig(Section):
    """The format of every answer; set exactly one of these keys (`structured: json_object` is short for the last).
    Tokens that would violate it are never chosen. A record's own `response_format` or `structured_outputs` wins."""

    json_schema: dict[str, Any] | str | None = None
    """A JSON schema, or the name of a file with one. `{"enum": {"$contexts": "id"}}` allows the ids (or `title`s) of
    the record's passages, and `{"$quote": true}` a string that appears word for word in one of them."""
    regex: Annotated[str, Field(min_length=1)] | None = None
    """A regular expression that the whole answer matches (Rust's syntax)."""
    choice: Choice | None = None
    """Texts; the answer is one of them."""
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """A grammar in llguidance's Lark or in GBNF, or the name of a `.lark`, `.gbnf` or `.ebnf` file."""
    json_object: Literal[True] | None = None
    """Any JSON object."""

    @model_validator(mode="before")
    @classmethod
    def _word(cls, given: Any) -> Any:
        if given == "json_object" or given == {"type": "json_object"}:
            return {"json_object": True}
        return _as_other_libraries_write_it(given, set(cls.model_fields)) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _only_one(self) -> StructuredConfig:
        given = list(self.model_dump(exclude_none=True))
        if len(given) != 1:
            problem = f"has {' and '.join(given)}" if given else "is empty"
            raise ValueError(
                f"{given[-1] if given else 'json_schema'}: the section {problem}; it takes exactly one key"
            )
        return self

    @property
    def form(self) -> Form:
        """Return the section as a Form."""
        if self.json_object:
            return Form("json_schema", {"type": "object"})
        kind, spec = next(iter(self.model_dump(exclude_none=True).items()))
        return Form(kind, spec)


def _as_other_libraries_write_it(given: dict[str, Any], ours: set[str]) -> dict[str, Any]:
    """Return a section in our keys; it may be a wrapped schema or have vLLM's old names. Raises ValueError."""
    if given and all(key in GUIDED for key in given):
        return {GUIDED[key]: value for key, value in given.items()}
    if given.keys() & ours and "type" not in given:
        return given
    if not given.keys() & {*CARRIERS, "type"} and not is_schema(given):
        return given
    if is_schema(given):
        raise ValueError("json_schema: the section itself is a schema; move it under json_schema")
    try:
        schema = unwrapped(given)
    except RecordError as error:
        raise ValueError(str(error).removeprefix("structured.")) from None
    return given if schema is given else {"json_schema": schema}


def with_files(config: StructuredConfig, source: str) -> StructuredConfig:
    """Return the section with file names replaced by the files' text. Raises ConfigError, also if it does not compile.

    Only for a config: a record never names a file.
    """
    if isinstance(config.json_schema, str):
        config = config.model_copy(update={"json_schema": _schema_in(config.json_schema, source)})
    if config.grammar is not None and config.grammar.endswith(GRAMMAR_SUFFIXES):
        config = config.model_copy(update={"grammar": _text_of(config.grammar, "grammar", source)})
    try:
        problem = problem_of(config.form.grammar(SOME))
    except RecordError as error:
        problem = str(error)
    if problem:
        raise ConfigError(f"{source}: {about_form(config.form, problem)}")
    return config


def about_form(form: Form, problem: str) -> str:
    """Return a problem with a form as one line that begins with the section's key."""
    return problem if problem.startswith("structured.") else f"structured.{form.kind}: {problem}"


def _schema_in(name: str, source: str) -> dict[str, Any]:
    text = _text_of(name, "json_schema", source)
    try:
        schema = loads(text)
    except JSONDecodeError as error:
        raise ConfigError(f"{source}: structured.json_schema: {name}:{error.lineno}: not JSON ({error.msg})") from None
    if not isinstance(schema, dict):
        raise ConfigError(f"{source}: structured.json_schema: {name}: must be a JSON object")
    return schema


def _text_of(name: str, key: str, source: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f'{source}: structured.{key}: cannot read "{name}" ({error}); give the name of a file, or its content'
        ) from None
