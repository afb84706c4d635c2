"""A run's figures for Prometheus, at http://127.0.0.1:9400/metrics while the run lasts.

    with MetricsServer("9400") as metrics:
        generate(config, observers=[metrics], report=metrics.report)

A scrape reads the run's totals when it comes; the run itself only counts failures by kind and record times. Every
client has a thread of its own, so one that hangs keeps nobody waiting. Limits: needs prometheus-client (the extra
`metrics`); what happens between the last scrape and the end of a run is in the statistics, not here.
"""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from threading import Thread
from typing import TYPE_CHECKING, Any, Self

from ragspec import __version__
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.host.machine import peak_memory
from ragspec.outputs.answers import FailedRecord
from ragspec.run.answering import RecordResult
from ragspec.stats import RunSummary

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

HERE = "127.0.0.1"
BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
POLL_S = 0.1  # between looks at whether the run has ended
CLIENT_S = 10.0  # that a client may take to ask, or to read the next piece


def address_of(given: str) -> tuple[str, int]:
    """Return host and port of PORT or HOST:PORT. Raises ConfigError."""
    host, colon, port = given.strip().rpartition(":")
    if not port.isdecimal() or not port.isascii() or int(port) > 65535 or (colon and not host):
        raise ConfigError(
            f'--metrics: "{given}" is not a valid port; give PORT, or HOST:PORT to listen on another address'
        )
    return host.strip("[]") or HERE, int(port)


class MetricsServer:
    """Serves the figures of one run. given: PORT or HOST:PORT; port 0 is any free one. config: what runs.

    Attributes:
        url: Where the figures are.

    Raises:
        ConfigError: prometheus-client is missing, or the port cannot be used.
    """

    def __init__(self, given: str | int, config: RunConfig | None = None) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise ConfigError('--metrics needs prometheus-client: pip install "ragspec[metrics]"') from None
        registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=registry)
        self._seconds = prometheus_client.Histogram(
            "ragspec_record_seconds", "Seconds that a record took.", buckets=BUCKETS_S, registry=registry
        )
        self._figures = RunFigures(config)
        registry.register(self._figures)
        self._server = _listen(*address_of(str(given)), prometheus_client.make_wsgi_app(registry))
        host = self._server.server_name
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, args=[POLL_S], name="ragspec-metrics", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()  # clients that still read do so on threads that end with the process

    def chosen(self, config: RunConfig) -> None:
        """Take the config that runs, whose runner is no longer `auto`."""
        self._figures.runner = config.runner

    def report(self, summary: RunSummary, total: int | None) -> None:
        """Take the totals to show from now on."""
        self._figures.summary, self._figures.total = summary, total

    def answered(self, result: RecordResult) -> None:
        """Count an answered record."""
        for cost in result.costs:
            self._seconds.observe(cost.latency_s)

    def failed(self, failed: FailedRecord) -> None:
        """Count a failed record."""
        self._figures.failures[failed.kind] += 1


def _listen(host: str, port: int, app: Any) -> WSGIServer:
    """Return a server of `app` that listens. Raises ConfigError."""
    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def server_bind(self) -> None:
            self.socket.bind(self.server_address)
            self.server_address = self.socket.getsockname()
            self.server_name, self.server_port = host, self.server_address[1]  # without asking a name server
            self.setup_environ()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing: a client that went away is no event of the run."""

    class Handler(WSGIRequestHandler):
        timeout = CLIENT_S

        def log_message(self, *_: Any) -> None:
            """Say nothing: a scrape is no event of the run."""

    try:
        return make_server(host, port, app, Server, Handler)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"--metrics: {host}:{port} cannot be used ({why}); choose another port") from None


class RunFigures:
    """What a scrape finds: a collector of prometheus-client. summary, total: set once the run has begun."""

    def __init__(self, config: RunConfig | None) -> None:
        self.summary = RunSummary()
        self.total: int | None = None
        self.failures: Counter[str] = Counter()
        self._model = str(config.model or config.runner) if config else ""
        self.runner = config.runner if config else ""
        self._started = time.time()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        summary = self.summary

        def counted(name: str, what: str, value: float) -> Any:
            return CounterMetricFamily(f"ragspec_{name}", what, value=value)

        def now(name: str, what: str, value: float) -> Any:
            return GaugeMetricFamily(f"ragspec_{name}", what, value=value)

        about = {"version": __version__, "model": self._model, "runner": self.runner, "method": summary.method}
        yield InfoMetricFamily("ragspec_run", "What runs.", value=about)
        yield now("start_time_seconds", "When the run began, in seconds since 1970.", self._started)
        records = CounterMetricFamily("ragspec_records", "Records by outcome.", labels=["state"])
        for state, count in (("answered", summary.records), ("failed", summary.failed), ("skipped", summary.skipped)):
            records.add_metric([state], count)
        yield records
        failures = CounterMetricFamily("ragspec_failures", "Failed records by kind of error.", labels=["kind"])
        for kind, count in list(self.failures.items()):
            failures.add_metric([kind], count)
        yield failures
        if self.total is not None:
            yield now("input_records", "Records of the input.", self.total)
        yield now("queue_records", "Records read but not finished.", summary.in_flight)
        yield counted("prompt_tokens", "Tokens of prompts.", summary.prompt_tokens)
        yield counted("cached_prompt_tokens", "Prompt tokens served from the cache.", summary.cached_prompt_tokens)
        yield counted("output_tokens", "Tokens of answers.", summary.output_tokens)
        yield counted("drafted_tokens", "Draft tokens.", summary.spec.drafted)
        yield counted("accepted_tokens", "Draft tokens that were accepted.", summary.spec.accepted)
        if summary.spec.acceptance_rate is not None:
            yield now("acceptance_ratio", "Accepted of drafted tokens, in the whole run.", summary.spec.acceptance_rate)
        seconds = GaugeMetricFamily("ragspec_phase_seconds", "Seconds of the run's phases.", labels=["phase"])
        for phase, value in (
            ("load", summary.load_s), ("warm_up", summary.warmup_s), ("answer", summary.generate_s),
        ):  # fmt: skip
            seconds.add_metric([phase], value)
        yield seconds
        yield now("peak_memory_bytes", "Peak memory of this process.", peak_memory()[0])
        if (gpu := _gpu_bytes()) is not None:
            yield now("gpu_memory_bytes", "GPU memory used by this process.", gpu)
        if summary.energy is not None:
            joules = CounterMetricFamily("ragspec_energy_joules", "Joules since the run began.", labels=["domain"])
            for domain, used in summary.energy.run_j.items():
                joules.add_metric([domain], used)
            yield joules
        workers = summary.workers
        yield now("workers", "Workers that answer.", sum(worker.alive for worker in workers) if workers else 1)
        yield counted("worker_deaths", "Workers that died and were replaced.", sum(each.deaths for each in workers))


def _gpu_bytes() -> int | None:
    """Return the GPU memory that torch holds, None if it uses no GPU here."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return sum(int(torch.cuda.memory_reserved(i)) for i in range(torch.cuda.device_count()))
