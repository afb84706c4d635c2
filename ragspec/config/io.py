"""The `input` and `output` sections of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ragspec.config.redaction import Place, Settings
from ragspec.config.sections import Section, listed


class PassageColumns(Section):
    """Where a record's passages are (`path`), and the input's names for each passage's fields: `id`, `title`, `text`,
    `score`. If the names are the same, a path can replace the section."""

    path: str = "contexts"
    id: str | None = None
    title: str | None = None
    text: str | None = None
    score: str | None = None


def _as_passages(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Passages = Annotated[PassageColumns, BeforeValidator(_as_passages, json_schema_input_type=PassageColumns | str)]


class ColumnNames(Section):
    """The input's names for the fields of a record (`id`, `query`, `contexts`, `messages`, `prompt`, `reference`,
    `metadata`, `custom_id`, `body`), for instance `{query: question, contexts: {path: passages, text: body}}`. A dot
    selects a nested field; in a list, it selects that field of each item. A field that none of the first records has is
    an error. `ragspec inspect` suggests a mapping."""

    id: str | None = None
    query: str | None = None
    contexts: Passages | None = None
    messages: str | None = None
    prompt: str | None = None
    reference: str | None = None
    metadata: str | None = None
    custom_id: str | None = None
    body: str | None = None

    @property
    def given(self) -> dict[str, str | dict[str, str]]:
        """Return the fields that the user set."""
        given = self.model_dump(exclude_none=True)
        if self.contexts is not None and list(given["contexts"]) == ["path"]:
            given["contexts"] = self.contexts.path
        return given


class InputConfig(Section):
    """Where records come from. A path or a list of paths can replace the section."""

    path: Annotated[
        list[Annotated[Place, Field(min_length=1)]],
        Field(min_length=1),
        BeforeValidator(listed, json_schema_input_type=str | list[str]),
    ]
    """JSONL, JSON (an array of records, or an object that contains one), CSV, TSV, plain text (`.txt`, one question per
    line), Parquet or Arrow files, compressed (gzip, Zstandard, bzip2, xz, zip) or not, in UTF-8 or UTF-16, local or at
    a URL (`s3://`, `gs://`, `hf://`, `https://`); glob patterns (`data/*.parquet`), folders, a folder written by
    `save_to_disk`, or `-` for stdin. With `format: dataset`, a dataset's id on the Hugging Face Hub. A record may be at
    most 256 MiB long."""
    format: Literal["auto", "jsonl", "json", "csv", "tsv", "text", "parquet", "arrow", "dataset"] = "auto"
    """`jsonl`, `json`, `csv`, `tsv`, `text` (one question per line), `parquet`, `arrow` or `dataset`; `auto`
    detects it from the content, or from the name if the content is ambiguous."""
    columns: ColumnNames = ColumnNames()
    split: str | None = None
    """dataset: the split; optional if there is only one."""
    name: str | None = None
    """dataset: the configuration's name."""
    revision: str | None = None
    """dataset: the revision on the hub."""
    storage_options: Settings = {}
    """Passed to fsspec with a URL, for instance `{anon: true}`. Credentials come from the environment (or
    `${NAME}`)."""

    @model_validator(mode="after")
    def _only_of_datasets(self) -> InputConfig:
        given = [key for key in ("split", "name", "revision") if getattr(self, key) is not None]
        if given and (self.format not in ("auto", "dataset") or not (self.format == "dataset" or self._may_be_saved())):
            raise ValueError(f"{given[0]}: is for datasets; set input.format: dataset")
        return self

    def _may_be_saved(self) -> bool:
        return len(self.path) == 1 and Path(self.path[0]).is_dir()

    def __str__(self) -> str:
        return ", ".join(self.path)

    @property
    def is_stdin(self) -> bool:
        """Return whether records come from stdin and can be read only once."""
        return "-" in self.path


def _as_input(value: Any) -> Any:
    return {"path": value} if isinstance(value, str | list) else value


Input = Annotated[InputConfig, BeforeValidator(_as_input, json_schema_input_type=InputConfig | str | list[str])]


class OutputConfig(Section):
    """Where answers go. A path can replace the section."""

    path: Place = "-"
    """A local JSONL or CSV file is appended to line by line; `-` is stdout. A path that ends in `.gz`, `.zst`,
    `.parquet` or `/`, and any URL (`s3://`, `gs://`), is a folder of parts; a path that ends in `.lance` is a Lance
    table, which gets a run's answers in one commit. Other extensions (`.xlsx`, `.bz2`, `.jsno`) are refused."""
    format: Literal["auto", "jsonl", "csv", "parquet", "openai"] = "auto"
    """`auto` uses the extension: CSV, Parquet or JSONL. `openai`: OpenAI Batch API lines, in JSONL. JSONL under another
    extension needs `jsonl`."""
    include: Annotated[
        list[Literal["query", "contexts"]], BeforeValidator(listed, json_schema_input_type=str | list[str])
    ] = []
    """What else each line contains: `query`, the question; `contexts`, the passages of the prompt with their texts (as
    `passages`)."""
    model: str | None = None
    """openai: the model name in the lines; by default `model`."""
    part_records: Annotated[int, Field(ge=1)] = 10_000
    """Records per part."""
    part_mib: Annotated[int, Field(ge=1, le=1024)] = 64
    """MiB per part, before compression."""
    storage_options: Settings = {}
    """Passed to fsspec with a URL, for instance `{endpoint_url: ...}`. Credentials come from the environment (or
    `${NAME}`)."""

    @model_validator(mode="after")
    def _only_in_our_lines(self) -> OutputConfig:
        if self.include and self.format == "openai":
            raise ValueError("include: not available in OpenAI's format; remove output.format or output.include")
        return self

    def __str__(self) -> str:
        return str(self.path)


def _as_output(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Output = Annotated[OutputConfig, BeforeValidator(_as_output, json_schema_input_type=OutputConfig | str)]
