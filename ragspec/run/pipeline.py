"""Answers in memory: a model that is loaded once, and asked as often as a program likes.

with Pipeline(config) as pipeline:
    for answer in pipeline.answers([{"query": "Who wrote it?", "contexts": ["Ann wrote it."]}]):
        print(answer["output"])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Self

from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.inputs.memory import MemorySource
from ragspec.outputs.journal import Journal
from ragspec.outputs.memory import MemorySink
from ragspec.run.local import LocalPass
from ragspec.run.session import prepare
from ragspec.stats import RunSummary


class Pipeline:
    """A model that is loaded once and answers records in memory.

    Use it as a context manager: the model loads on enter and is freed on exit. `input`, `output` and `scale` of the
    config are not used.

    Args:
        config: What to run, from `load_config`.

    Attributes:
        summary: Totals of the latest call of `answers`, complete once its iterator is exhausted.

    Raises:
        ConfigError: The config cannot run here. Raised before any weights load.
        ModelError: The model or its backend could not start.
    """

    def __init__(self, config: RunConfig) -> None:
        self._veil = config.veil()
        self.summary = RunSummary()
        self._answering = False
        with self._veil.over_errors():
            self._session = prepare(config)

    def __enter__(self) -> Self:
        with self._veil.over_errors(), ExitStack() as stack:
            stack.enter_context(self._session.runner)
            self._session.runner.warm_up()
            stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._session.runner.__exit__(*exc)

    def answers(self, records: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield the output line of each record.

        Records are read as they are needed, so `records` may be an endless generator.

        Args:
            records: Records as the lines of an input file would have them, such as
                `{"id": "q1", "query": "Why?", "contexts": ["a passage"]}`.

        Returns:
            An iterator over output lines, in the order of the records; with `order: finish`, as they finish. A record
            that cannot be answered yields a line with `error` instead of `output`.

        Raises:
            ConfigError: The iterator of an earlier call is neither exhausted nor closed.
        """
        if self._answering:
            raise ConfigError(
                "a pipeline answers one input at a time: take the earlier answers to their end, or close()"
            )
        self._answering = True
        try:
            yield from self._answers(records)
        finally:
            self._answering = False

    def _answers(self, records: Iterable[Any]) -> Iterator[dict[str, Any]]:
        config = self._session.config
        sink = MemorySink()
        with (
            self._veil.over_errors(),
            MemorySource(records) as source,
            Journal(sink, order=config.order) as journal,
        ):
            executor = LocalPass(self._session, source, journal)
            self.summary = executor.summary
            for _ in executor.stream():
                yield from sink.take()
        self.summary.notes += self._session.notes()
        yield from sink.take()
