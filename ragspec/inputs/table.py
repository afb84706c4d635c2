"""Tables: Parquet and Arrow files, and Hugging Face datasets, a batch of rows at a time.

>>> for row in TableSource(Stream("questions.parquet").look(), ALL): row.value["query"]

Needs pyarrow. `raw` is the row's JSON, so a row keeps its identity in a file of another format.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import IO, Any

from ragspec.errors import ConfigError, RecordError, flat
from ragspec.inputs.arrow_offsets import damaged_rows
from ragspec.inputs.base import SECOND, InputRow, NumberedRows, day, duration, time_of_day, timestamp
from ragspec.inputs.columns import Columns, listed
from ragspec.inputs.content import DAMAGES, Stream, failure_reason
from ragspec.inputs.storage import is_url, missing, open_binary

BATCH = 1024  # rows
UNITS = {"s": SECOND, "ms": 10**6, "us": 1000, "ns": 1}  # nanoseconds


class TableSource(NumberedRows):
    """The rows of one Parquet or Arrow file. stream: its bytes; compressed ones are unpacked to a temporary file."""

    def __init__(
        self, stream: Stream, columns: Columns, kind: str = "parquet", options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(stream.path, columns, options)
        self._once = stream.is_member or is_url(stream.path)
        self._kind = kind
        self._rows: int | None = None
        self.names: list[str] = []
        self._batches: Callable[[], Iterator[Any]] = lambda: iter(())
        self._arrow = arrow(stream.path)
        with ExitStack() as stack:
            with stream:
                file = stack.enter_context(self._seekable(stream))
            self._open(kind, file)
            columns.check(self.names, stream.path)
            self._stack = stack.pop_all()

    def _seekable(self, stream: Stream) -> IO[bytes]:
        """Return the file, seekable."""
        try:
            if not (stream.packed or stream.is_member):
                return open_binary(self._path, self._options, seeks=True)
            assert stream.file is not None
            with ExitStack() as stack:
                unpacked = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(stream.file, unpacked, 1 << 20)
                unpacked.seek(0)
                stack.pop_all()
            return unpacked
        except FileNotFoundError as error:
            raise ConfigError(f"{self._path}: {missing(error)}") from None
        except (OSError, *DAMAGES) as error:
            raise ConfigError(f"{self._path}: {failure_reason(error)}") from None

    def _open(self, kind: str, file: IO[bytes]) -> None:
        try:
            schema = self._open_parquet(file) if kind == "parquet" else self._open_arrow(file)
        except (OSError, self._arrow.ArrowException) as error:
            raise ConfigError(f"{self._path}: cannot be read as {kind} ({flat(error, 160)})") from None
        if (twice := repeated_name(schema)) is not None:
            raise ConfigError(f'{self._path}: two columns are called "{twice}"; rename one of them')
        self.names = schema.names

    def _open_parquet(self, file: IO[bytes]) -> Any:
        import pyarrow.parquet

        table: Any = pyarrow.parquet.ParquetFile(file)
        self._rows = table.metadata.num_rows
        self._batches = lambda: table.iter_batches(batch_size=BATCH)
        return table.schema_arrow

    def _open_arrow(self, file: IO[bytes]) -> Any:
        import pyarrow.ipc

        whole = file.read(6) == b"ARROW1"  # else the streaming format, which Hugging Face datasets use
        file.seek(0)
        reader: Any = pyarrow.ipc.open_file(file) if whole else pyarrow.ipc.open_stream(file)
        by_place = (reader.get_batch(i) for i in range(reader.num_record_batches)) if whole else iter(reader)
        self._batches = lambda: by_place
        return reader.schema

    def reopen(self) -> TableSource | None:
        """Return a second source over the same file; None for a URL or a zip member."""
        if self._once:
            return None
        return TableSource(Stream(self._path, self._options).look(), self._columns, self._kind, self._options)

    def __iter__(self) -> Iterator[InputRow]:
        number = 0
        batches = self._batches()
        while True:
            try:
                batch = next(batches, None)
            except (OSError, self._arrow.ArrowException) as error:
                raise ConfigError(f"{self.where(number + 1)}: cannot be read ({flat(error, 160)})") from None
            if batch is None:
                return
            damaged = damaged_rows(batch) if self._kind == "arrow" else set()  # Parquet has no offsets
            for at in range(0, batch.num_rows, BATCH):
                for value in values_of(batch.slice(at, BATCH), {row - at for row in damaged}):
                    number += 1
                    yield self._row(number, value)

    def count(self) -> int | None:
        """Return the number of rows in a Parquet file's metadata; None for Arrow files."""
        return self._rows


def arrow(path: str) -> Any:
    """Return the pyarrow module. Raises ConfigError if it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f'{path}: reading it needs pyarrow: pip install "ragspec[tables]"') from None
    return pyarrow


def values_of(batch: Any, damaged: Collection[int] = ()) -> Iterator[Any]:
    """Yield the rows of a record batch or table; a row that Python cannot hold (invalid UTF-8) is a RecordError.

    damaged: rows that must not be read.
    """
    from pyarrow import ArrowException

    with suppress(ValueError, OverflowError, ArrowException):
        if not any(row in damaged for row in range(batch.num_rows)):
            yield from _to_rows(batch)
            return
    for at in range(batch.num_rows):
        if at in damaged:
            yield RecordError("cannot be read (its offsets, which say where its texts and lists are, are damaged)")
            continue
        try:
            yield from _to_rows(batch.slice(at, 1))
        except (ValueError, OverflowError, ArrowException) as error:
            yield RecordError(f"cannot be read ({flat(error, 160)})")


def repeated_name(schema: Any) -> str | None:
    """Return a name shared by two columns or two fields of a struct: Python's dict would keep only the last."""
    names: list[str] = [field.name for field in schema]
    if len(set(names)) < len(names):
        return next(name for name in names if names.count(name) > 1)
    return next((name for field in schema if (name := repeated_name(_inner(field.type)))), None)


def _inner(kind: Any) -> list[Any]:
    """Return the fields inside a type, looking through dictionary and extension types."""
    import pyarrow

    while isinstance(kind, pyarrow.DictionaryType | pyarrow.BaseExtensionType):
        kind = kind.value_type if isinstance(kind, pyarrow.DictionaryType) else kind.storage_type
    return [kind.field(place) for place in range(kind.num_fields)]


def _to_rows(batch: Any) -> list[dict[str, Any]]:
    columns = [
        [_value(scalar) for scalar in column] if _holds_times(field.type) else column.to_pylist()
        for field, column in zip(batch.schema, batch.columns, strict=True)
    ]
    if not columns:
        return [{} for _ in range(batch.num_rows)]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _holds_times(kind: Any) -> bool:
    from pyarrow import DictionaryType, types

    if isinstance(kind, DictionaryType):
        return _holds_times(kind.value_type)
    return bool(types.is_temporal(kind)) or any(_holds_times(field.type) for field in _inner(kind))


def _value(scalar: Any) -> Any:
    """Return a scalar's value, times as text: pyarrow (26) drops nanoseconds and refuses years beyond 1 to 9999."""
    import pyarrow
    from pyarrow import types

    kind = scalar.type
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pyarrow.DictionaryScalar | pyarrow.ExtensionScalar):
        return _value(scalar.value) if _holds_times(kind) else scalar.as_py()
    if types.is_timestamp(kind):
        zone = pyarrow.lib.string_to_tzinfo(kind.tz) if kind.tz else None
        return timestamp(scalar.value * UNITS[kind.unit], zone)
    if types.is_date(kind):
        return day(scalar.value if types.is_date32(kind) else scalar.value // 86_400_000)
    if types.is_time(kind):
        return time_of_day(scalar.value * UNITS[kind.unit])
    if types.is_duration(kind):
        return duration(scalar.value * UNITS[kind.unit])
    if types.is_struct(kind):
        return {name: _value(item) for name, item in scalar.items()}
    if types.is_map(kind):
        return [[_value(key), _value(item)] for key, item in (pair.values() for pair in scalar.values)]
    if isinstance(scalar, pyarrow.ListScalar):
        return [_value(item) for item in scalar.values]
    return scalar.as_py()


# -- Hugging Face datasets -------------------------------------------------------------------------


class DatasetSource(NumberedRows):
    """The rows of one split of a dataset, streamed from the hub or saved by `save_to_disk`.

        >>> for row in DatasetSource("rag-datasets/mini", Columns({}), split="test"): row.value["query"]

    Needs the `datasets` library. Nothing is downloaded as a whole. Limit: datasets with loading code are refused.

    Args:
        path: the dataset's name on the hub, or a folder.
        columns: the mapping of its columns.
        split: which split; may be omitted if there is only one.
        name: the dataset's configuration.
        revision: a branch, tag or commit on the hub.
        saved: `path` is a folder.
    """

    def __init__(
        self,
        path: str,
        columns: Columns,
        *,
        split: str | None = None,
        name: str | None = None,
        revision: str | None = None,
        saved: bool = False,
    ) -> None:
        super().__init__(path, columns)
        self._given: dict[str, Any] = {"split": split, "name": name, "revision": revision, "saved": saved}
        self._data = self._chosen(self._load(name, revision, saved), split)
        self.names: list[str] = self._data.column_names or []
        if self.names:
            columns.check(self.names, path)

    def _load(self, name: str | None, revision: str | None, saved: bool) -> Any:
        try:
            import datasets
        except ImportError:
            raise ConfigError(f'{self._path}: reading it needs datasets: pip install "ragspec[datasets]"') from None
        try:
            if saved:
                return datasets.load_from_disk(self._path)
            return datasets.load_dataset(self._path, name, revision=revision, streaming=True)
        except Exception as error:  # the hub, the network and the files each raise their own errors
            problem = f"{type(error).__name__}: {flat(error, 200)}"
            raise ConfigError(f"{self._path}: the dataset cannot be opened ({problem})") from None

    def _chosen(self, found: Any, split: str | None) -> Any:
        if not isinstance(found, dict):  # one split only
            return found
        if split is None and len(found) == 1:
            return next(iter(found.values()))
        if split not in found:
            problem = "input.split: missing" if split is None else f'input.split: "{split}" is not there'
            raise ConfigError(f"{problem}; {self._path} has {listed(found)}")
        return found[split]

    def __iter__(self) -> Iterator[InputRow]:
        number = 0
        batches = self._data.with_format("arrow").iter(batch_size=BATCH)
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:  # as above, in the middle
                problem = f"{type(error).__name__}: {flat(error, 200)}"
                raise ConfigError(f"{self.where(number + 1)}: cannot be read ({problem})") from None
            if batch is None:
                return
            for value in values_of(batch):
                number += 1
                yield self._row(number, value)

    def reopen(self) -> DatasetSource | None:
        """Return a second source over a saved dataset; None for one on the hub, which would be downloaded again."""
        return DatasetSource(self._path, self._columns, **self._given) if self._given["saved"] else None

    def count(self) -> int | None:
        """Return the number of rows, None if the dataset does not state it."""
        try:
            return len(self._data)
        except TypeError:  # streamed
            splits = getattr(self._data.info, "splits", None) or {}
            rows = getattr(splits.get(str(self._data.split)), "num_examples", None)
            return int(rows) if rows and math.isfinite(rows) else None
