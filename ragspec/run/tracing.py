"""A run and its records as OpenTelemetry spans.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 ragspec generate --config c.yaml --tracing

A program that has set a tracer provider gets the spans there; otherwise they are exported by OTLP over HTTP, set up by
OpenTelemetry's own environment variables (OTEL_TRACES_EXPORTER=console prints them to stderr). Spans hold counts and
times, no text of prompts or answers. Limits: a span is dropped where a collector does not keep up, so that the run
does not wait for it; at the end a run waits FLUSH_S at most.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from threading import Thread
from typing import Any, Self

from ragspec import __version__
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.outputs.answers import FailedRecord
from ragspec.run.answering import RecordResult
from ragspec.stats import RunSummary

FLUSH_S = 5
EXPORTERS = ("otlp", "console", "none")
NEEDS = '--tracing needs OpenTelemetry: pip install "ragspec[tracing]"'


class RunTrace:
    """The spans of one run. Raises ConfigError if OpenTelemetry is missing or its exporter is not known."""

    def __init__(self, config: RunConfig) -> None:
        try:
            from opentelemetry import trace
        except ImportError:
            raise ConfigError(NEEDS) from None
        self._trace = trace
        self._export = None if _has_provider(trace) else Export()
        provider = trace.get_tracer_provider() if self._export is None else self._export.provider
        self._tracer = provider.get_tracer("ragspec", __version__)
        self._model = str(config.model or config.runner)
        self._attributes = {
            "gen_ai.request.model": self._model,
            "ragspec.runner": config.runner,
            "ragspec.method": config.speculation.method,
            "ragspec.input": str(config.input),
            "ragspec.output": str(config.output),
        }
        self._redact = config.redactor()
        self._summary = RunSummary()
        self._loaded_at: int | None = None

    def __enter__(self) -> Self:
        self._run = self._tracer.start_span("ragspec.run", attributes=self._attributes)
        self._inside = self._trace.set_span_in_context(self._run)
        return self

    def chosen(self, config: RunConfig) -> None:
        """Take the config that runs, whose runner is no longer `auto`."""
        self._run.set_attribute("ragspec.runner", config.runner)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        summary, status = self._summary, self._trace.Status
        if self._loaded_at is not None:
            self._phase("ragspec.load", self._loaded_at - _ns(summary.load_s), summary.load_s)
            self._phase("ragspec.warm_up", self._loaded_at, summary.warmup_s)
        self._run.set_attributes(
            {
                "ragspec.records": summary.records,
                "ragspec.failed": summary.failed,
                "ragspec.skipped": summary.skipped,
                "gen_ai.usage.input_tokens": summary.prompt_tokens,
                "gen_ai.usage.output_tokens": summary.output_tokens,
            }
        )
        if kind is not None:
            self._run.set_attribute("error.type", kind.__name__)
            self._run.set_status(status(self._trace.StatusCode.ERROR, self._redact(str(error))))
        self._run.end()
        if self._export is not None:
            summary.notes += self._export.end()

    def report(self, summary: RunSummary, total: int | None) -> None:
        """Take the totals, and note when the model was loaded."""
        self._summary = summary
        if self._loaded_at is None and summary.load_s:
            self._loaded_at = time.time_ns()

    def answered(self, result: RecordResult) -> None:
        """Add the span of an answered record."""
        took_s = max((cost.latency_s for cost in result.costs), default=0.0)
        first = [cost.time_to_first_token_s for cost in result.costs if cost.time_to_first_token_s is not None]
        span = self._record(result.id, took_s)
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": result.prompt_tokens,
                "gen_ai.usage.output_tokens": sum(cost.output_tokens for cost in result.costs),
                "ragspec.cached_prompt_tokens": sum(cost.cached_prompt_tokens for cost in result.costs),
                "ragspec.drafted_tokens": sum(cost.spec.drafted for cost in result.costs),
                "ragspec.accepted_tokens": sum(cost.spec.accepted for cost in result.costs),
                **({"ragspec.time_to_first_token_s": min(first)} if first else {}),
            }
        )
        span.end()

    def failed(self, failed: FailedRecord) -> None:
        """Add the span of a failed record."""
        span = self._record(failed.name, 0.0)
        span.set_attribute("error.type", failed.kind)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, failed.message))
        span.end()

    def _record(self, name: str, took_s: float) -> Any:
        """Return the span of a record that has just ended."""
        attributes = {"ragspec.record.id": name, "gen_ai.request.model": self._model}
        begin = time.time_ns() - _ns(took_s)
        return self._tracer.start_span("ragspec.record", self._inside, start_time=begin, attributes=attributes)

    def _phase(self, name: str, begin: int, took_s: float) -> None:
        self._tracer.start_span(name, self._inside, start_time=begin).end(begin + _ns(took_s))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _has_provider(trace: Any) -> bool:
    """Return whether the program has set a tracer provider."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


class Export:
    """A tracer provider that exports as the environment says. Raises ConfigError."""

    def __init__(self) -> None:
        self._ended = self._exported = 0
        try:
            from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

            exporter = _exporter()
        except ImportError:
            raise ConfigError(NEEDS) from None
        counts = self

        class CountingExporter(SpanExporter):
            def export(self, spans: Any) -> Any:
                done = exporter.export(spans)
                if done is SpanExportResult.SUCCESS:
                    counts._exported += len(spans)
                return done

            def shutdown(self) -> None:
                exporter.shutdown()

        class CountingProcessor(SpanProcessor):
            def on_end(self, span: Any) -> None:
                counts._ended += 1

        # a collector that is away is told in one note, not in a traceback for each batch
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(CountingProcessor())
        if exporter is not None:
            self.provider.add_span_processor(BatchSpanProcessor(CountingExporter()))
        self._exports = exporter is not None

    def end(self) -> list[str]:
        """Export what is left, and return notes for the user."""
        # on a thread: the SDK's own limits do not hold where a collector takes a connection and says nothing
        ending = Thread(target=self.provider.shutdown, name="ragspec-tracing", daemon=True)
        ending.start()
        ending.join(FLUSH_S)
        lost = self._ended - self._exported if self._exports else 0
        return [f"the OpenTelemetry collector did not accept {lost:,} of {self._ended:,} spans"] if lost else []


def _exporter() -> Any:
    """Return the exporter that OTEL_TRACES_EXPORTER names, None for none. Raises ConfigError and ImportError."""
    word = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or EXPORTERS[0]
    if word == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    if word == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    if word != "none":
        raise ConfigError(f'OTEL_TRACES_EXPORTER: "{word}" is not known; choose one of {", ".join(EXPORTERS)}')
    return None
