"""Runs in this process: `LocalPass` answers a source into a journal, `Pipeline` answers records in memory.

    with Pipeline(config) as pipeline:
        for answer in pipeline.answers([{"query": "Who wrote it?", "contexts": ["Ann wrote it."]}]):
            print(answer["output"])

The runner pulls everything: rows, prompts and output lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from os import PathLike
from typing import Any, Self
from weakref import finalize

from ragspec.config.load import config_of, load_config
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.inputs.base import Source
from ragspec.inputs.feed import Feed
from ragspec.inputs.sources import MemorySource
from ragspec.outputs.answers import NativeFormat
from ragspec.outputs.base import MemorySink
from ragspec.outputs.journal import Journal
from ragspec.outputs.openai_batch import line_format_of
from ragspec.outputs.shown import Answer
from ragspec.records import Request
from ragspec.run.answering import Answering, HearAnswer, RecordTask
from ragspec.run.budget import BudgetGate
from ragspec.run.energy import RunEnergy
from ragspec.run.ordering import Say, ignore_note, ordering_of
from ragspec.run.record_reader import RecordReader
from ragspec.run.result_writer import Observer, Report, ResultWriter
from ragspec.run.runner_choice import downloads, remember
from ragspec.run.session import Session, peak_memory_gib, prepare
from ragspec.stats import RunSummary

AHEAD = 256  # requests counted before warm-up: more than any batch


class LocalPass:
    """One pass of a session over a source, in this process.

    Args:
        session: The runner, prompts and retriever.
        source: The input rows.
        journal: Receives the output lines.
        limit: Read only this many rows.
        total: Expected number of rows, None if unknown.
        report: Called as records finish.
        observers: Are told of each record.
        say: Called with a line on what `prompt.order` saves, before anything is answered.
        keep_details: Also write what an audit and a report need.
        hear: Called with each answer as it grows, if the runner can tell.
        gate: Ends the pass when a budget is spent.
        tasks: Answer these instead of the source's rows.
    """

    def __init__(
        self,
        session: Session,
        source: Source,
        journal: Journal,
        *,
        limit: int | None = None,
        total: int | None = None,
        report: Report | None = None,
        observers: Sequence[Observer] = (),
        say: Say = ignore_note,
        keep_details: bool = False,
        hear: HearAnswer | None = None,
        gate: BudgetGate | None = None,
        tasks: Iterable[RecordTask] | None = None,
    ) -> None:
        shape = NativeFormat() if keep_details else line_format_of(session.config)
        self._session = session
        self._runner = session.runner
        self._tasks = tasks
        self._gate = gate
        self._writer = ResultWriter(session, source, journal, shape, total, report, observers)
        self._record_reader = RecordReader(session.config, self._writer, source)
        self._ordering = ordering_of(session, source, self._record_reader, limit, say)
        self.summary = self._writer.summary
        hold = None if gate is None else partial(gate.watch, self.summary)
        self._answering = Answering(session, shape, self._writer, details=keep_details, hear=hear, hold=hold)
        self._no_records = f"{session.config.input}: contains no records; nothing to answer"
        self._energy = RunEnergy(session.config, self.summary)

    def answer(self) -> None:
        """Load the model if there is anything to answer, and answer it."""
        with self._requests() as requests, self._energy:
            first = next(requests, None)  # rows with errors before it need no model
            if first is None:
                held = self._gate is not None and self._gate.stopped
                if not (self.summary.failed or self.summary.skipped or held):
                    self.summary.notes.append(self._no_records)
                return
            requests.put_back([first])
            self._load_and_stream(requests)
        self.summary.notes += self._record_reader.notes() + self._writer.notes()
        self.summary.notes += self._ordering.notes() + self._answering.notes()

    def about(self) -> dict[str, Any]:
        """Return what identifies the run in its statistics."""
        return self._session.about()

    def _load_and_stream(self, requests: Feed[Request]) -> None:
        summary, runner = self.summary, self._runner
        started = time.perf_counter()
        with runner:
            summary.load_s = time.perf_counter() - started
            self._writer.begin()
            started = time.perf_counter()
            runner.warm_up(self._expected_requests(requests))
            summary.warmup_s = time.perf_counter() - started
            for _ in self._outcomes(requests):
                pass

    def _expected_requests(self, requests: Feed[Request]) -> int | None:
        """Return about how many requests will come, None if unknown: a warm-up must not outlast them."""
        known = self._writer.expected_rows()
        if known is not None and known > AHEAD:
            return known
        head = requests.take(AHEAD, wait=False)
        all_there = requests.over
        requests.put_back(head)
        return len(head) if all_there else known

    def stream(self) -> Iterator[None]:
        """Answer the input with a runner that is already loaded, and time it; yield after each outcome."""
        with self._requests() as requests, self._energy:
            yield from self._outcomes(requests)

    def _outcomes(self, requests: Feed[Request]) -> Iterator[None]:
        summary, runner = self.summary, self._runner
        prefill_s, decode_s, decode_tokens = runner.prefill_s, runner.decode_s, runner.decode_tokens
        started = time.perf_counter()
        self._energy.begin_answering()
        try:
            for _ in self._answering.outcomes(requests):
                summary.generate_s = time.perf_counter() - started
                yield
        finally:
            summary.generate_s = time.perf_counter() - started
            self._energy.update()
            summary.method = runner.method  # the runner may have chosen another one while loading
            summary.prefill_s = _since(runner.prefill_s, prefill_s)
            summary.decode_s = _since(runner.decode_s, decode_s)
            summary.decode_tokens = runner.decode_tokens - decode_tokens
            summary.peak_memory_gib = peak_memory_gib(runner)

    @contextmanager
    def _requests(self) -> Iterator[Feed[Request]]:
        """Yield the input as requests; on exit, stop reading and searching ahead."""
        requests = self._answering.requests(self._ordering.tasks() if self._tasks is None else Feed(self._tasks))
        try:
            yield requests
        finally:
            requests.close()
            self.summary.retrieval = self._ordering.retrieval() or self._answering.retrieval()


def _since(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before


# -- in memory -------------------------------------------------------------------------------------


class Pipeline:
    """A model that is loaded once and answers records in memory.

    As a context manager, the model loads on enter and is freed on exit. Without `with`, it loads when the first answer
    is asked for, and `close()` frees it. `input`, `output.path` and `scale` of the config are not used.

    Args:
        config: What to run: from `load_config`, or a mapping or the path of a YAML file as it takes them.

    Attributes:
        summary: Totals of the latest call of `answers`, complete once its iterator is exhausted.

    Raises:
        ConfigError: The config cannot run here. Raised before any weights load.
        ModelError: The model or its backend could not start.
    """

    def __init__(self, config: RunConfig | Mapping[str, Any] | str | PathLike[str]) -> None:
        config = checked_config(config)
        self._redact = config.redactor()
        self.summary = RunSummary()
        self._running: list[Generator[Answer]] = []  # of the iterator that is neither exhausted nor closed
        finalize(self, _close, self._running)  # at the interpreter's end, while modules are whole
        self._loaded = False
        with self._redact.over_errors():
            self._session = prepare(config)

    def __enter__(self) -> Self:
        self.load()
        return self

    def __exit__(self, *exc: Any) -> None:
        _close(self._running)
        self._loaded = False
        self._session.runner.__exit__(*exc)

    def __repr__(self) -> str:
        config = self._session.config
        state = "loaded" if self._loaded else "not loaded"
        return f"Pipeline({config.model or config.runner}, method {config.speculation.method}, {state})"

    def load(self, warming_up: Callable[[], None] | None = None) -> None:
        """Load the model now rather than with the first answer; nothing if it is loaded.

        Args:
            warming_up: Called once the weights are loaded.

        Raises:
            ModelError: The model or its backend could not start.
        """
        if self._loaded:
            return
        config = self._session.config
        with self._redact.over_errors(), ExitStack() as stack:
            downloaded, began = downloads(config), time.perf_counter()
            stack.enter_context(self._session.runner)
            loaded = time.perf_counter()
            if warming_up is not None:
                warming_up()
            self._session.runner.warm_up()
            stack.pop_all()
        self._loaded = True
        took = RunSummary(load_s=loaded - began, warmup_s=time.perf_counter() - loaded)
        remember(config, took, downloaded=downloaded)

    def close(self) -> None:
        """Free the model, if it is loaded. The next answer loads it again; an iterator over answers is over."""
        if self._loaded:
            self.__exit__(None, None, None)

    def ask(
        self,
        question: str,
        contexts: str | Mapping[str, Any] | Iterable[Any] | None = None,
        *,
        hear: HearAnswer | None = None,
    ) -> Answer:
        """Return the answer to one question.

        Args:
            question: The question.
            contexts: Its passages, in any form that a record's `contexts` may have: texts, or objects with `id`,
                `title` and `text`; a single text or object is one passage. By default none, or those that the
                config's `retrieval` finds.
            hear: As for `answers`.

        Raises:
            ConfigError: As for `answers`.
        """
        record: dict[str, Any] = {"query": question}
        if isinstance(contexts, Mapping):
            record["contexts"] = dict(contexts)
        elif contexts is not None:
            several = isinstance(contexts, Iterable) and not isinstance(contexts, str)
            record["contexts"] = list(contexts) if several else contexts
        (answer,) = self.answers([record], hear=hear)
        return answer

    def answers(
        self, records: Iterable[Any], *, hear: HearAnswer | None = None, progress: bool = False
    ) -> Iterator[Answer]:
        """Yield the output line of each record.

        Records are read as they are needed, so `records` may be an endless generator.

        Args:
            records: Records as the lines of an input file would have them, such as
                `{"id": "q1", "query": "Why?", "contexts": ["a passage"]}`; or one such record.
            hear: Called with each answer as it grows: an object with its `id`, its `text` and `reasoning` so far, and
                the spans of the text that are `copied` from a passage. Only ragspec's engine calls it.
            progress: Show a bar, in a notebook too.

        Returns:
            An iterator over output lines, each a dictionary that notebooks show, in the order of the records; with
            `order: finish`, as they finish. A record that cannot be answered yields a line with `error` instead of
            `output`.

        Raises:
            ConfigError: The iterator of an earlier call is neither exhausted nor closed, `records` is a text or a
                data frame, or the pipeline is closed before the iterator is exhausted.
        """
        if isinstance(records, str):
            raise ConfigError("records: must be records, not a text; ask() answers a question, generate() reads a file")
        is_table = hasattr(records, "to_dict") or hasattr(records, "to_pylist")
        if hasattr(records, "columns") and is_table:  # iterating over a data frame or an Arrow table gives columns
            raise ConfigError(
                'records: must be records, not a data frame; give its rows: to_dict("records") of pandas, to_dicts() '
                "of Polars, to_pylist() of Arrow"
            )
        if isinstance(records, Mapping):
            records = [records]
        if self._running:
            raise ConfigError("a pipeline answers one input at a time: exhaust the earlier iterator, or close() it")
        self.load()
        found = self._answers(records, hear)
        self._running.append(found)
        try:
            yield from bar_over(found, len(records) if isinstance(records, Sized) else None) if progress else found
            if not self._running:
                raise ConfigError("the pipeline was closed before all records were answered")
        finally:
            _close(self._running)

    def _answers(self, records: Iterable[Any], hear: HearAnswer | None) -> Generator[Answer]:
        config = self._session.config
        sink = MemorySink()
        with (
            self._redact.over_errors(),
            MemorySource(records) as source,
            Journal(sink, order=config.order) as journal,
        ):
            executor = LocalPass(self._session, source, journal, hear=hear)
            self.summary = executor.summary
            for _ in executor.stream():
                yield from map(Answer, sink.take())
        self.summary.notes += self._session.notes()
        yield from map(Answer, sink.take())


def _close(running: list[Generator[Answer]]) -> None:
    """Close iterators over answers, and forget them."""
    while running:
        running.pop().close()


def checked_config(config: RunConfig | Mapping[str, Any] | str | PathLike[str]) -> RunConfig:
    """Return a config that may be given as `load_config` takes it. Raises ConfigError."""
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, Mapping):
        return config_of(deepcopy(dict(config)), "config")[0]
    return load_config(str(config))[0]


def bar_over(answers: Iterator[Answer], total: int | None) -> Iterator[Answer]:
    """Yield answers under a progress bar, which a notebook shows as its own."""
    from tqdm.auto import tqdm

    yield from tqdm(answers, total=total, unit="answer", disable=False)
