"""The first records of an input, for a look at them before a run."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice

from ragspec.config.places import InputConfig
from ragspec.errors import RecordError
from ragspec.inputs.opening import open_source
from ragspec.inputs.record import parse_record
from ragspec.records import Record


def first_records(given: InputConfig, rows: int, form: str) -> list[Record]:
    """Return the records of the first rows; rows that are none are left out. form: `prompt.source`.

    Raises ConfigError for an input that cannot be read.
    """
    records = []
    with open_source(given) as source:
        for row in islice(source, rows):
            with suppress(RecordError):
                records.append(parse_record(row.value, row.number, form))
    return records
