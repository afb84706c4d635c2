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
    """What a config names, loaded on enter and freed on exit. `input`, `output` and `scale` of the config are not
    used.

    summary: totals of the latest `answers`. Raises ConfigError and ModelError.
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
        """Yield the output line of each record as soon as its turn comes (`order: finish`: as soon as it is answered).

        records: what the lines of an input file would say. A record that cannot be answered yields its error line.
        Raises ConfigError while earlier answers are still being taken.
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
