"""Read the lines of an output, whatever its format: what a run wrote, as JSON objects.

>>> [text_of(line) for line in answer_lines("answers.jsonl")]
['Ann Smith built it.']
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ragspec.config.io import InputConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.sources import open_source
from ragspec.inputs.values import id_text
from ragspec.outputs import csv_file
from ragspec.outputs.codecs import LANCE, line_of
from ragspec.outputs.table import rows_of

OUTPUT_HINT = "takes the output of a run: a file, a folder of parts, or a URL"


def answer_lines(path: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of an output, whatever its format. Raises ConfigError."""
    if csv_file.written_here(Path(path)):
        yield from csv_file.lines_of(Path(path))
        return
    if path.rstrip("/").lower().endswith(LANCE) and Path(path).is_dir():
        yield from map(line_of, rows_of(Path(path)))
        return
    is_table = path.lower().endswith(".parquet")
    with open_source(InputConfig(path=[path])) as source:
        for row in source:
            value = json_object(row.value, source.where(row.number))
            texts = is_table or any(isinstance(value.get(key), str) for key in ("metadata", "logprobs", "passages"))
            yield line_of(value) if texts else value


def answers_in(path: str) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """Yield each line of an output with its id and its answer, None for an error line. Raises ConfigError."""
    for line in answer_lines(path):
        name, text = id_of(line), text_of(line)
        if name is None or (text is None and "error" not in line):
            raise ConfigError(f"{path}: not an output of ragspec: its lines need id and output")
        yield name, text, line


def json_object(value: Any, where: str) -> dict[str, Any]:
    """Return a row's value if it is a JSON object. Raises ConfigError led by `where`."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {value if isinstance(value, RecordError) else 'not a JSON object'}")
    return value


def id_of(line: Mapping[str, Any]) -> str | None:
    """Return the id of a line's record, in either output format; None if it has none."""
    return id_given(line.get("custom_id", line.get("id")))


def id_given(given: Any) -> str | None:
    """Return an id in the form that records have; None if it is not an id."""
    try:
        return id_text(given)
    except RecordError:
        return None


def text_of(line: Mapping[str, Any]) -> str | None:
    """Return a line's answer, in either output format; None if it has none."""
    if isinstance(line.get("output"), str):
        return str(line["output"])
    try:
        choice = line["response"]["body"]["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (KeyError, TypeError, IndexError):
        return None
    return text if isinstance(text, str) else None


def tokens_of(line: Mapping[str, Any]) -> int | None:
    """Return how many tokens a line's answers have, in either output format; None if it does not say."""
    if "response" not in line:
        count = line.get("output_tokens")
        return int(count) if isinstance(count, int | float) and float(count).is_integer() else None
    try:
        return int(line["response"]["body"]["usage"]["completion_tokens"])
    except (KeyError, TypeError, ValueError):
        return None


def native(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line in ragspec's own form: OpenAI's lines as the fields that they have of it.

    >>> native({"custom_id": "q1", "response": {"body": {"choices": [{"text": "Ann."}]}}})
    {'id': 'q1', 'output': 'Ann.'}
    """
    if "custom_id" not in line:
        return dict(line)
    body = _object(_object(line.get("response")).get("body"))
    choices, usage, error = body.get("choices"), _object(body.get("usage")), line.get("error") or None
    first = _object(choices[0]) if isinstance(choices, list) and choices else {}
    found = {
        "id": id_of(line),
        "output": text_of(line),
        "finish_reason": first.get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "output_tokens": usage.get("completion_tokens"),
        "error": {"type": error.get("code"), "message": error.get("message")} if isinstance(error, dict) else error,
    }
    return {name: value for name, value in found.items() if value is not None}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
