"""Hugging Face datasets: one from the hub, streamed, or a folder that `save_to_disk` wrote.

>>> for row in DatasetSource("rag-datasets/mini", Columns({}), split="test"): row.value["query"]

Needs the `datasets` library. Nothing is downloaded as a whole. Limit: datasets that bring code are not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ragspec.errors import ConfigError, flat
from ragspec.inputs.base import Row
from ragspec.inputs.columns import Columns, listed
from ragspec.inputs.rows import NumberedRows
from ragspec.inputs.table import BATCH, values_of


class DatasetSource(NumberedRows):
    """The rows of one split. name: of the dataset's configuration. saved: whether `path` is a folder on disk."""

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
        except Exception as error:  # the hub, the network and the dataset's own files: each has its own errors
            said = f"{type(error).__name__}: {flat(error, 200)}"
            raise ConfigError(f"{self._path}: the dataset cannot be opened ({said})") from None

    def _chosen(self, found: Any, split: str | None) -> Any:
        if not isinstance(found, dict):  # one split only
            return found
        if split is None and len(found) == 1:
            return next(iter(found.values()))
        if split not in found:
            asked = "input.split: missing" if split is None else f'input.split: "{split}" is not there'
            raise ConfigError(f"{asked}; {self._path} has {listed(found)}")
        return found[split]

    def __iter__(self) -> Iterator[Row]:
        number = 0
        batches = self._data.with_format("arrow").iter(batch_size=BATCH)
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:  # as above, in the middle
                said = f"{type(error).__name__}: {flat(error, 200)}"
                raise ConfigError(f"{self.where(number + 1)}: cannot be read ({said})") from None
            if batch is None:
                return
            for value in values_of(batch):
                number += 1
                yield self._row(number, value)

    def reopen(self) -> DatasetSource | None:
        """Return the same source, to be read once more; None for one on the hub, which would be sent again."""
        return DatasetSource(self._path, self._columns, **self._given) if self._given["saved"] else None

    def count(self) -> int | None:
        """Return how many rows there are, if the dataset says so."""
        try:
            return len(self._data)
        except TypeError:  # streamed
            splits = getattr(self._data.info, "splits", None) or {}
            rows = getattr(splits.get(str(self._data.split)), "num_examples", None)
            return int(rows) if rows and math.isfinite(rows) else None
