"""Parquet and Arrow files, a batch of rows at a time.

>>> for row in TableSource("questions.parquet", Columns({})): row.value["query"]

Needs pyarrow. `number` counts rows; `raw` is the row's JSON, so a row keeps its identity whatever file it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from ragspec.errors import ConfigError, RecordError, flat
from ragspec.inputs.base import Row
from ragspec.inputs.columns import Columns
from ragspec.inputs.rows import NumberedRows
from ragspec.inputs.storage import missing, open_binary

BATCH = 1024  # rows


class TableSource(NumberedRows):
    """The rows of one .parquet, .arrow, .feather or .ipc file."""

    def __init__(
        self, path: str, columns: Columns, kind: str = "parquet", options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(path, columns, options)
        self._rows: int | None = None
        self._names: list[str] = []
        self._batches: Callable[[], Iterator[Any]] = lambda: iter(())
        self._arrow = arrow(path)
        with ExitStack() as stack:
            self._open(kind, stack)
            columns.check(self._names, path)
            self._stack = stack.pop_all()

    def _open(self, kind: str, stack: ExitStack) -> None:
        try:
            file = stack.enter_context(open_binary(self._path, self._options, seeks=True))
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
        except FileNotFoundError as error:
            raise ConfigError(f"{self._path}: {missing(error)}") from None
        except (OSError, self._arrow.ArrowException) as error:
            raise ConfigError(f"{self._path}: cannot be read as {kind} ({flat(error, 160)})") from None

    def __iter__(self) -> Iterator[Row]:
        number = 0
        batches = self._batches()
        while True:
            try:
                batch = next(batches, None)
            except (OSError, self._arrow.ArrowException) as error:
                raise ConfigError(f"{self.where(number + 1)}: cannot be read ({flat(error, 160)})") from None
            if batch is None:
                return
            for at in range(0, batch.num_rows, BATCH):
                for value in self._values(batch.slice(at, BATCH)):
                    number += 1
                    yield self._row(number, value)

    def _values(self, batch: Any) -> Iterator[Any]:
        """Yield the batch's rows; one that Python cannot hold (text that is not UTF-8, say) is its own error."""
        try:
            yield from batch.to_pylist()
        except (ValueError, OverflowError, self._arrow.ArrowException):
            for at in range(batch.num_rows):
                try:
                    yield from batch.slice(at, 1).to_pylist()
                except (ValueError, OverflowError, self._arrow.ArrowException) as error:
                    yield RecordError(f"cannot be read ({flat(error, 160)})")

    def count(self) -> int | None:
        """Return how many rows a Parquet file says it has; None for Arrow files, which would have to be read."""
        return self._rows


def arrow(path: str) -> Any:
    """Return pyarrow. Raises ConfigError where it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f'{path}: reading it needs pyarrow: pip install "ragspec[tables]"') from None
    return pyarrow
