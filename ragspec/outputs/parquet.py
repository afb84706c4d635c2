"""Answers as Parquet: one column per field of an output line. docs/guide/output.md lists them.

`metadata`, `logprobs` and `parsed`, whose form the records decide, are JSON texts. Needs pyarrow.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ragspec.errors import ConfigError, flat
from ragspec.json_text import JSONDecodeError, dumps, loads
from ragspec.outputs.ledger import Drop, Finished

AS_JSON = ("metadata", "logprobs", "parsed")
FINISHED = ["id", "fingerprint", "error", "prompt_tokens", "output_tokens"]  # what tells what a row finishes


class Parquet:
    """A part is one Parquet file with one row group, compressed with zstd."""

    ending = ".parquet"

    def __init__(self) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise ConfigError('output: Parquet needs pyarrow: pip install "ragspec[tables]"') from None
        self._arrow = pyarrow
        self._parquet = pyarrow.parquet
        self.schema = _schema(pyarrow)

    def encode(self, lines: Sequence[bytes]) -> bytes:
        """Return the file's content."""
        rows = [_row(loads(line)) for line in lines]
        try:
            return self._written(self._arrow.Table.from_pylist(rows, schema=self.schema))
        except self._arrow.ArrowException as error:
            raise OSError(errno.EINVAL, f"cannot be written as Parquet ({flat(error, 160)})") from None

    def finished(self, data: bytes) -> list[Finished]:
        """Return what its rows finish."""
        return [_finished(row) for row in self._read(data, FINISHED).to_pylist()]

    def without(self, data: bytes, drop: Drop) -> bytes:
        """Return the content without the rows to drop."""
        table = self._read(data)
        return self._written(table.filter(self._arrow.array([not drop(each) for each in self.finished(data)])))

    def _read(self, data: bytes, columns: list[str] | None = None) -> Any:
        try:
            return self._parquet.read_table(io.BytesIO(data), columns=columns)
        except (OSError, self._arrow.ArrowException) as error:
            raise ValueError(f"cannot be read as Parquet ({error})") from None

    def _written(self, table: Any) -> bytes:
        file = io.BytesIO()
        self._parquet.write_table(table, file, compression="zstd")
        return file.getvalue()


def _finished(row: dict[str, Any]) -> Finished:
    if row["error"] is not None:
        return Finished(row["fingerprint"], row["id"], True, message=row["error"]["message"] or "")
    return Finished(row["fingerprint"], row["id"], False, row["prompt_tokens"] or 0, row["output_tokens"] or 0)


def line_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the output line that a row says: what is a JSON text there is its value again."""
    line = {key: value for key, value in row.items() if value is not None}
    for key in AS_JSON:
        with suppress(KeyError, JSONDecodeError):  # a text that another program wrote stays one
            line[key] = loads(line[key]) if isinstance(line[key], str) else line[key]
    return line


def _row(line: dict[str, Any]) -> dict[str, Any]:
    if scores := line.get("context_scores"):
        line["context_scores"] = [None if score is None else float(score) for score in scores]
    return line | {key: dumps(line[key]).decode() for key in AS_JSON if line.get(key) is not None}


def _schema(arrow: Any) -> Any:
    text, whole, real = arrow.string(), arrow.int64(), arrow.float64()
    speculation = {
        "method": text, "steps": whole, "drafted": whole, "accepted": whole, "acceptance_rate": real,
        "mean_acceptance_length": real, "off": text,
    }  # fmt: skip
    columns = {
        "id": text,
        "output": text,
        "outputs": arrow.list_(text),
        "reasoning": text,
        "reasonings": arrow.list_(text),
        "reasoning_tokens": whole,
        "finish_reason": text,
        "finish_reasons": arrow.list_(text),
        "valid": arrow.bool_(),
        "parsed": text,
        "prompt_tokens": whole,
        "cached_prompt_tokens": whole,
        "output_tokens": whole,
        "time_to_first_token_s": real,
        "latency_s": real,
        "speculation": arrow.struct(list(speculation.items())),
        "contexts": arrow.list_(text),
        "context_scores": arrow.list_(real),
        "dropped_contexts": arrow.list_(text),
        "copied": arrow.list_(arrow.struct([("start", whole), ("end", whole), ("context", text)])),
        "logprobs": text,
        "metadata": text,
        "error": arrow.struct([("type", text), ("message", text)]),
        "line": whole,
        "fingerprint": text,
        "config": text,
    }
    return arrow.schema(list(columns.items()))
