"""Parquet and Arrow files, a batch of rows at a time.

>>> for row in TableSource("questions.parquet", Columns({})): row.value["query"]

Needs pyarrow. `number` counts rows; `raw` is the row's JSON, so a row keeps its identity whatever file it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import orjson

from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import Row
from ragspec.inputs.columns import Columns
from ragspec.inputs.plain import plain

BATCH = 1024  # rows


class TableSource:
    """The rows of one .parquet, .arrow, .feather or .ipc file."""

    def __init__(self, path: str, columns: Columns, kind: str = "parquet") -> None:
        self._path = path
        self._columns = columns
        self._rows: int | None = None
        self._names: list[str] = []
        self._batches: Callable[[], Iterator[Any]] = lambda: iter(())
        self._stack = ExitStack()
        self._arrow = arrow(path)
        try:
            self._open(kind)
            columns.check(self._names, path)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, kind: str) -> None:
        try:
            file = Path(self._path).open("rb")  # noqa: SIM115 (the stack closes it)
            self._stack.enter_context(file)
            if kind == "parquet":
                import pyarrow.parquet

                table: Any = pyarrow.parquet.ParquetFile(file)
                self._names, self._rows = table.schema_arrow.names, table.metadata.num_rows
                self._batches = lambda: table.iter_batches(batch_size=BATCH)
                return
            import pyarrow.ipc

            if file.read(6) == b"ARROW1":
                file.seek(0)
                reader: Any = pyarrow.ipc.open_file(file)
                self._batches = lambda: (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:  # a stream, as Hugging Face datasets are saved
                file.seek(0)
                reader = pyarrow.ipc.open_stream(file)
                self._batches = lambda: iter(reader)
            self._names = reader.schema.names
        except FileNotFoundError:
            raise ConfigError(f"{self._path}: no such file") from None
        except (OSError, self._arrow.ArrowException) as error:
            raise ConfigError(f"{self._path}: cannot be read as {kind} ({_short(error)})") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[Row]:
        number = 0
        batches = self._batches()
        while True:
            try:
                batch = next(batches, None)
            except (OSError, self._arrow.ArrowException) as error:
                raise ConfigError(f"{self.where(number + 1)}: cannot be read ({_short(error)})") from None
            if batch is None:
                return
            for at in range(0, batch.num_rows, BATCH):
                for value in self._values(batch.slice(at, BATCH)):
                    number += 1
                    yield row_of(number, value, self._columns)

    def _values(self, batch: Any) -> Iterator[Any]:
        """Yield the batch's rows; one that Python cannot hold (text that is not UTF-8, say) is its own error."""
        try:
            yield from batch.to_pylist()
        except (ValueError, OverflowError, self._arrow.ArrowException):
            for at in range(batch.num_rows):
                try:
                    yield from batch.slice(at, 1).to_pylist()
                except (ValueError, OverflowError, self._arrow.ArrowException) as error:
                    yield RecordError(f"cannot be read ({_short(error)})")

    def count(self) -> int | None:
        """Return how many rows a Parquet file says it has; None for Arrow files, which would have to be read."""
        return self._rows

    def where(self, number: int) -> str:
        """Return "path: row 3"."""
        return f"{self._path}: row {number}"


def row_of(number: int, value: Any, columns: Columns) -> Row:
    """Return a table's row as a Row; one that JSON cannot hold, or that lacks a field, says so in its value."""
    if isinstance(value, RecordError):
        return Row(number, b"", value)
    try:
        found = plain(value)
        raw = orjson.dumps(found)
    except (TypeError, ValueError) as error:
        return Row(number, b"", RecordError(f"cannot be written as JSON ({error})"))
    try:
        return Row(number, raw, columns.of(found))
    except RecordError as error:
        return Row(number, raw, error)


def arrow(path: str) -> Any:
    """Return pyarrow. Raises ConfigError where it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f'{path}: reading it needs pyarrow: pip install "ragspec[tables]"') from None
    return pyarrow


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
