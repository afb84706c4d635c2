"""The doctor's look at the input: whether it is there and may be read, and how much of it records could share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ragspec.config.places import InputConfig
from ragspec.config.run import RunConfig
from ragspec.config.secret import revealed
from ragspec.errors import ConfigError
from ragspec.inputs.files import size_of
from ragspec.inputs.head import first_records
from ragspec.inputs.opening import open_source
from ragspec.inputs.storage import advising, is_url
from ragspec.prompts.builder import canonical
from ragspec.prompts.numbered import Numbered, kept_places
from ragspec.prompts.sharing import computed, shared_order
from ragspec.records import Record
from ragspec.run.doctor import Finding


def examine_input(given: InputConfig) -> Finding:
    """Return whether a run could open the input. A pipe is not opened: that would take what it holds."""
    if given.is_stdin:
        return Finding("ok", "input: stdin")
    if any(map(_is_pipe, given.path)):
        return Finding("ok", f"input {given}: a pipe or device")
    try:
        with advising("--input takes a file of records, or - for stdin", revealed(given.path)), open_source(given):
            size = size_of(given)
    except ConfigError as error:
        return Finding("error", f"input: {error}")
    if size is None:
        return Finding("ok", f"input {given}: can be opened")
    if size == 0:
        return Finding("note", f"input {given}: empty")
    return Finding("ok", f"input {given}: {size / (1 << 20):,.1f} MiB")


def examine_passages(config: RunConfig) -> Iterator[Finding]:
    """Yield how much of the passages a run computes in each order, from the first rows; nothing where none come."""
    records = _first_records(config)
    passages = Numbered()
    most = config.prompt.max_passages
    numbers = [passages.of(record, most) for record in records]
    plan = shared_order(numbers, passages.weights, config.prompt.keep_first)
    if not plan.total:
        return
    alike = [_alike(record, own) for record, own in zip(records, numbers, strict=True)]
    shares = {"rank": plan.by_rank, "canonical": computed(alike, passages.weights), "shared": plan.computed}
    told = ", ".join(f"{name} {cost / plan.total:.0%}" for name, cost in shares.items())
    yield Finding(
        "ok", f"passages of the first {len(records):,} records to be computed, by prompt.order: {told} of their text"
    )


def _alike(record: Record, numbers: list[int]) -> list[int]:
    """Return a record's passages in canonical order."""
    kept = dict(zip(kept_places(record, len(numbers)), numbers, strict=True))
    return [kept[place] for place in canonical(record.contexts) if place in kept]


def _first_records(config: RunConfig) -> list[Record]:
    """Return the records of the first window; none of a pipe, from elsewhere, or where they cannot be read."""
    given = config.input
    if given is None or given.is_stdin or given.format == "dataset" or any(map(is_url, given.path)):
        return []
    if any(map(_is_pipe, given.path)):
        return []
    try:
        return first_records(given, config.prompt.order_window, config.prompt.source)
    except ConfigError:
        return []


def _is_pipe(name: str) -> bool:
    path = Path(name)
    return path.exists() and not (path.is_file() or path.is_dir())
