"""How the lines of a part are encoded: JSON Lines, plain or compressed, or Parquet.

>>> codec_of("answers.jsonl.zst").ending
'.jsonl.zst'

Parquet needs pyarrow.
"""

from __future__ import annotations

import errno
import gzip
import io
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import starmap
from pathlib import PurePath
from typing import Any, Protocol

import orjson
import zstandard

from ragspec.errors import ConfigError, flat
from ragspec.inputs.storage import is_url
from ragspec.inputs.values import is_text, kind
from ragspec.json_text import JSONDecodeError, dumps, loads
from ragspec.outputs.ledger import Drop, Finished

# -- Parquet ---------------------------------------------------------------------------------------

AS_JSON = ("metadata", "logprobs", "parsed", "passages")  # their types depend on the record: stored as JSON texts
MOST = 1 << 63  # columns of whole numbers hold those below
FINISHED = ["id", "fingerprint", "error", "prompt_tokens", "output_tokens", "request", "config"]  # what Finished needs


class Parquet:
    """Parts as Parquet files with one row group, compressed with zstd, and a column per field of an output line."""

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
        """Return a part's content."""
        rows = [row_of(loads(line)) for line in lines]
        try:
            return self._written(self._arrow.Table.from_pylist(rows, schema=self.schema))
        except self._arrow.ArrowException as error:
            raise OSError(errno.EINVAL, f"cannot be written as Parquet ({flat(error, 160)})") from None

    def finished(self, data: bytes) -> list[Finished]:
        """Return what a part's rows finish."""
        return [finished_of(row) for row in self._read(data, FINISHED).to_pylist()]

    def without(self, data: bytes, drop: Drop) -> bytes:
        """Return a part's content without the rows to drop."""
        table = self._read(data)
        return self._written(table.filter(self._arrow.array([not drop(each) for each in self.finished(data)])))

    def lines(self, data: bytes) -> list[bytes]:
        """Return a part's rows as output lines."""
        return [dumps(line_of(row), option=orjson.OPT_APPEND_NEWLINE) for row in self._read(data).to_pylist()]

    def _read(self, data: bytes, columns: list[str] | None = None) -> Any:
        try:
            file = self._parquet.ParquetFile(io.BytesIO(data))
            there = set(file.schema_arrow.names)  # parts of older versions lack newer columns
            return file.read(columns=None if columns is None else [name for name in columns if name in there])
        except (OSError, self._arrow.ArrowException) as error:
            raise ValueError(f"cannot be read as Parquet ({error})") from None

    def _written(self, table: Any) -> bytes:
        file = io.BytesIO()
        self._parquet.write_table(table, file, compression="zstd")
        return file.getvalue()


def finished_of(row: dict[str, Any]) -> Finished:
    """Return what a row with the columns FINISHED finishes."""
    by = (row.get("request") or "", row.get("config") or "")
    if row["error"] is not None:
        return Finished(row["fingerprint"], row["id"], True, 0, 0, row["error"]["message"] or "", *by)
    return Finished(row["fingerprint"], row["id"], False, row["prompt_tokens"] or 0, row["output_tokens"] or 0, "", *by)


def line_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as an output line, with JSON texts parsed."""
    line = {key: value for key, value in row.items() if value is not None}
    for key in AS_JSON:
        with suppress(KeyError, JSONDecodeError):  # a text from another program stays a text
            line[key] = loads(line[key]) if isinstance(line[key], str) else line[key]
    return line


def row_of(line: dict[str, Any]) -> dict[str, Any]:
    """Return an output line as a row of a table."""
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
        "query": text,
        "passages": text,
        "metadata": text,
        "error": arrow.struct([("type", text), ("message", text)]),
        "line": whole,
        "fingerprint": text,
        "request": text,
        "config": text,
    }
    return arrow.schema(list(columns.items()))


def misfit(line: Mapping[str, Any], schema: Any) -> str:
    """Return which field of an output line its column cannot hold, and why; "" if all fit. schema: of Parquet."""
    columns = (column for column in schema if column.name not in AS_JSON)
    return next(filter(None, (_misfit(line.get(each.name), each.type, each.name) for each in columns)), "")


def _misfit(value: Any, form: Any, name: str) -> str:
    """Return how a value differs from an Arrow type, "" if the type holds it."""
    from pyarrow import types

    if value is None:
        return ""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = number and abs(value) < MOST and float(value).is_integer()
    forms = (
        (types.is_struct, "an object", isinstance(value, dict)),
        (types.is_list, "a list", isinstance(value, list)),
        (types.is_boolean, "a boolean", isinstance(value, bool)),
        (types.is_string, "a string", is_text(value)),
        (types.is_floating, "a number", whole or isinstance(value, float)),
        (types.is_integer, "a whole number", whole),
    )
    wanted, held = next((wanted, held) for is_form, wanted, held in forms if is_form(form))
    if not held:
        got = f"{value!s:.20}" if number and wanted.endswith("number") else kind(value)
        return f'"{name}" must be {wanted}, got {got}'
    parts: list[tuple[Any, Any, str]] = []
    if types.is_struct(form):
        parts = [(value.get(each.name), each.type, f"{name}.{each.name}") for each in form]
    elif types.is_list(form):
        parts = [(item, form.value_type, f"{name}[]") for item in value]
    return next(filter(None, starmap(_misfit, parts)), "")


def foreign(line: Mapping[str, Any], schema: Any) -> list[str]:
    """Return the fields of an output line that have no column."""
    from pyarrow import types

    inner = [(each.name, each.type) for each in schema if types.is_struct(each.type)]
    return [
        *(name for name in line if name not in schema.names),
        *(
            f"{name}.{field}"
            for name, form in inner
            for field in line.get(name) or ()
            if form.get_field_index(field) < 0
        ),
    ]


# -- lines -----------------------------------------------------------------------------------------

LINES = (".jsonl", ".ndjson")
PACKINGS = (".gz", ".zst")
# endings of formats that are not written
OTHERS = (
    *(".json", ".tsv", ".tab", ".xls", ".xlsx", ".ods", ".arrow", ".feather", ".ipc", ".orc", ".avro"),
    *(".bz2", ".xz", ".zip", ".7z", ".rar", ".tar", ".tgz", ".lz4", ".br", ".z", ".lzma", ".snappy"),
    *(".sqlite", ".sqlite3", ".db", ".duckdb", ".h5", ".hdf5", ".npy", ".npz", ".pkl", ".pickle", ".msgpack"),
    *(".html", ".htm", ".xml", ".yaml", ".yml", ".toml", ".md", ".pdf", ".docx"),
)
ENDING = re.compile(r"\.[a-z]{3,}")
UNSAID = (".txt", ".out", ".log", ".tmp", ".dat")  # endings of files that may hold anything, lines of JSON too
CSV, LANCE = ".csv", ".lance"
POSSIBLE = "NAME.jsonl, NAME.jsonl.gz, NAME.jsonl.zst, NAME.csv, NAME.parquet, NAME.lance or a folder (NAME/)"


class Codec(Protocol):
    """A way to encode lines. ending: of a part's name."""

    @property
    def ending(self) -> str: ...

    def encode(self, lines: Sequence[bytes]) -> bytes:
        """Return a part's content. lines: JSON, each with its line end."""

    def finished(self, data: bytes) -> list[Finished]:
        """Return what a part's lines finish. Raises ValueError if it cannot be read."""

    def without(self, data: bytes, drop: Drop) -> bytes:
        """Return a part's content without the lines to drop."""

    def lines(self, data: bytes) -> list[bytes]:
        """Return a part's lines as JSON, each with its end. Raises ValueError if it cannot be read."""


@dataclass(frozen=True, slots=True)
class Lines:
    """JSON Lines, compressed or not."""

    ending: str
    pack: Callable[[bytes], bytes] = bytes
    unpack: Callable[[bytes], bytes] = bytes

    def encode(self, lines: Sequence[bytes]) -> bytes:
        return self.pack(b"".join(lines))

    def finished(self, data: bytes) -> list[Finished]:
        return [Finished.of(line) for line in self.lines(data)]

    def without(self, data: bytes, drop: Drop) -> bytes:
        return self.encode([line for line in self.lines(data) if not drop(Finished.of(line))])

    def lines(self, data: bytes) -> list[bytes]:
        try:
            return self.unpack(data).splitlines(keepends=True)
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise ValueError(f"the compressed data is damaged ({error})") from None


def _gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # deterministic, so that a part sent twice has the same bytes


def _zipped(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def _unzipped(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


PLAIN, GZIP, ZSTD = (
    Lines(".jsonl"),
    Lines(".jsonl.gz", _gzipped, gzip.decompress),
    Lines(".jsonl.zst", _zipped, _unzipped),
)


def codec_of(path: str, format: str = "auto") -> Codec:
    """Return the codec of an output's parts; JSON Lines with zstd unless its name says otherwise."""
    name = path.rstrip("/").lower()
    if format == "parquet" or (format == "auto" and name.endswith(".parquet")):
        return Parquet()
    if name.endswith(".gz"):
        return GZIP
    return PLAIN if name.endswith((*LINES, ".json")) else ZSTD


def check_ending(path: str, format: str = "auto") -> None:
    """Raise ConfigError for an output whose name promises a format that it would not have, or that is no format.

    format: the config's; with JSON Lines, the name may end in .json or in anything that is no format.
    """
    name = path.rstrip("/").lower()
    lines = format in ("jsonl", "openai")
    inner = name.removesuffix(".gz").removesuffix(".zst")
    if format in ("parquet", "csv") and name.endswith((*LINES, *PACKINGS)):
        raise ConfigError(f"output.format: {format}, but {path} ends in .{name.rpartition('.')[2]}")
    if lines and name.endswith(CSV):
        raise ConfigError(f"output.format: {format}, but {path} ends in {CSV}")
    ending = next((ending for ending in OTHERS if inner.endswith(ending)), "")
    if ending == ".json" and lines:
        return
    if inner != name and inner.endswith((".parquet", CSV)):
        ending = name.removeprefix(inner.rpartition(".")[0])
    elif is_url(path) or path.endswith("/"):
        ending = CSV if inner.endswith(CSV) else ending  # a file, not a folder of parts
    elif not ending and format == "auto":
        ending = _unknown(name)
    if ending:
        lines_too = ending not in (CSV, *OTHERS) or ending == ".json"
        so = "; for JSON Lines under that name, set output.format: jsonl" if lines_too and inner == name else ""
        raise ConfigError(f"{path}: cannot write {ending} files; choose one of {POSSIBLE}{so}")


def _unknown(name: str) -> str:
    """Return the ending of a file's name if it is a word but no format, such as ".jsnol"; else ""."""
    ending, known = PurePath(name).suffix, (*LINES, *PACKINGS, *UNSAID, CSV, LANCE, ".parquet")
    return ending if ENDING.fullmatch(ending) and ending not in known else ""
