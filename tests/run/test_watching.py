"""What other programs see of a run while it lasts: its statistics, Prometheus, OpenTelemetry."""

import json
import socket
import threading
import urllib.request
from contextlib import ExitStack

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError, ModelError
from ragspec.run import statistics
from ragspec.run.generate import generate
from ragspec.run.metrics import address_of
from ragspec.stats import Energy, RunSummary, SpecStats, WorkerSummary
from tests.conftest import read_jsonl, write_jsonl

FAKE = {"runner": "fake", "speculation": {"method": "prompt_lookup"}}


@pytest.fixture
def config(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": f"q{i}", "query": f"question {i}"} for i in range(12)])
    given = {**FAKE, "input": source, "output": str(tmp_path / "out.jsonl")}
    return build_config({**given, "runner_args": {"fail_ids": ["q7"], "batch_size": 2}})


# -- statistics ------------------------------------------------------------------------------------


def test_the_statistics_are_written_while_a_run_goes_on(tmp_path, config, monkeypatch):
    monkeypatch.setattr(statistics, "EVERY_S", 0.0)
    monkeypatch.setattr(statistics, "SHARE", 1e9)
    path, seen = tmp_path / "out.stats.json", []

    class Reader:
        def answered(self, result):
            seen.append(json.loads(path.read_text()) if path.exists() else None)

        failed = answered

    generate(config, observers=[Reader()])
    assert [each["state"] for each in seen[1:]] == ["running"] * 11
    assert [each["records"] + each["failed"] for each in seen[1:]] == list(range(1, 12))
    assert seen[-1]["input_records"] == 12
    last = json.loads(path.read_text())
    assert (last["state"], last["records"], last["failed"]) == ("finished", 11, 1)


def test_the_statistics_say_that_a_run_has_begun_before_it_loads(tmp_path, config, monkeypatch):
    from ragspec.runners import fake

    path, seen, enter = tmp_path / "out.stats.json", [], fake.Runner.__enter__
    monkeypatch.setattr(
        fake.Runner, "__enter__", lambda runner: (seen.append(json.loads(path.read_text())), enter(runner))[1]
    )
    generate(config, limit=4)
    generate(config)
    assert [(each["state"], each["records"], each["input_records"]) for each in seen] == [
        ("running", 0, 4),
        ("running", 0, 12),
    ]


def test_a_run_with_nothing_to_do_leaves_the_statistics_as_they_were(tmp_path, config):
    generate(config)
    before = (tmp_path / "out.stats.json").read_bytes()
    generate(config)
    assert json.loads((tmp_path / "out.stats.json").read_bytes()) == json.loads(before)


def test_a_run_that_breaks_off_says_so(tmp_path, config):
    class Breaks:
        def answered(self, result):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        generate(config, observers=[Breaks()])
    assert json.loads((tmp_path / "out.stats.json").read_text())["state"] == "stopped"


def test_a_run_with_nothing_to_do_finishes_the_statistics_of_one_that_was_killed(tmp_path, config):
    generate(config)
    path = tmp_path / "out.stats.json"
    killed = json.loads(path.read_text()) | {"state": "running"}
    path.write_text(json.dumps(killed))
    generate(config)
    found = json.loads(path.read_text())
    assert (found["state"], found["records"]) == ("finished", 11)


def test_statistics_elsewhere_are_those_of_the_latest_run(tmp_path, config):
    for records in (11, 0):
        generate(config, stats_path=str(tmp_path / "s.json"))
        assert json.loads((tmp_path / "s.json").read_text())["records"] == records


def test_statistics_that_cannot_be_written_do_not_stop_a_run(tmp_path, config, monkeypatch):
    monkeypatch.setattr(statistics, "EVERY_S", 0.0)
    (tmp_path / "out.stats.json").mkdir()
    summary = generate(config)
    assert summary.records == 11
    assert any("the statistics cannot be written" in note for note in summary.notes)


# -- Prometheus ------------------------------------------------------------------------------------


class Scraper:
    """Scrapes a run after each record."""

    def __init__(self):
        self.url, self.found = None, []

    def say(self, said):
        if said.startswith("metrics at "):
            self.url = said.removeprefix("metrics at ")

    def answered(self, result):
        pytest.importorskip("prometheus_client")
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(self.url, timeout=60) as reply:
            families = text_string_to_metric_families(reply.read().decode())
        samples = [sample for family in families for sample in family.samples]
        self.found.append({(each.name, *each.labels.values()): each.value for each in samples})

    failed = answered


def test_a_scrape_during_a_run_shows_its_figures(config):
    pytest.importorskip("prometheus_client")
    scraper = Scraper()
    summary = generate(config, metrics=0, observers=[scraper], say=scraper.say)
    assert len(scraper.found) == 12
    middle, last = scraper.found[5], scraper.found[-1]
    assert middle["ragspec_records_total", "answered"] == 6
    assert middle["ragspec_input_records",] == 12
    assert middle["ragspec_queue_records",] > 0
    assert last["ragspec_records_total", "answered"] == 11
    assert last["ragspec_records_total", "failed"] == 1
    assert last["ragspec_records_total", "skipped"] == 0
    assert last["ragspec_failures_total", "BackendError"] == 1
    assert last["ragspec_output_tokens_total",] == summary.output_tokens
    assert last["ragspec_acceptance_ratio",] == 1.0
    assert last["ragspec_workers",] == 1
    assert last["ragspec_record_seconds_count",] == 11
    assert last["process_resident_memory_bytes",] > 1 << 20
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(scraper.url, timeout=60)


def test_the_runner_is_the_one_that_auto_chose(config, monkeypatch):
    pytest.importorskip("prometheus_client")
    from ragspec.run import generate as module
    from ragspec.run.runner_choice import RunnerChoice

    monkeypatch.setattr(module, "check_model", lambda config: None)
    monkeypatch.setattr(module, "choose_runner", lambda *_, **__: RunnerChoice(config))
    scraper = Scraper()
    auto = config.model_copy(update={"runner": "auto"})
    generate(auto, metrics=0, observers=[scraper], say=scraper.say)
    infos = [key for key in scraper.found[0] if key[0] == "ragspec_run_info"]
    assert ["fake" in key for key in infos] == [True]


def test_figures_of_workers_energy_and_prompts(config):
    pytest.importorskip("prometheus_client")
    from ragspec.run.metrics import RunFigures

    figures = RunFigures(config)
    figures.summary = RunSummary(
        records=4, failed=1, skipped=2, prompt_tokens=50, cached_prompt_tokens=20, load_s=1.0, warmup_s=2.0,
        spec=SpecStats(steps=4, drafted=10, accepted=6), energy=Energy({"package-0": 9.0}, {"package-0": 5.0}),
        workers=[WorkerSummary(name="0", alive=True, deaths=2), WorkerSummary(name="1", deaths=1)],
    )  # fmt: skip
    samples = [sample for family in figures.collect() for sample in family.samples]
    found = {(each.name, *each.labels.values()): each.value for each in samples}
    assert found["ragspec_records_total", "skipped"] == 2
    assert found["ragspec_records_total", "failed"] == 1
    assert found["ragspec_prompt_tokens_total",] == 50
    assert found["ragspec_cached_prompt_tokens_total",] == 20
    assert found["ragspec_drafted_tokens_total",] == 10
    assert found["ragspec_accepted_tokens_total",] == 6
    assert found["ragspec_energy_joules_total", "package-0"] == 9.0
    assert found["ragspec_phase_seconds", "load"] == 1.0
    assert found["ragspec_phase_seconds", "warm_up"] == 2.0
    assert found["ragspec_workers",] == 1
    assert found["ragspec_worker_deaths_total",] == 3


def test_clients_that_hang_keep_neither_the_run_nor_other_clients_waiting(config):
    pytest.importorskip("prometheus_client")
    scraper, clients = Scraper(), []
    with ExitStack() as stack:

        def say(said):
            scraper.say(said)
            host, port = scraper.url.removeprefix("http://").removesuffix("/metrics").split(":")
            for asks in (b"", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
                hanging = stack.enter_context(socket.create_connection((host, int(port))))
                hanging.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                hanging.sendall(asks)  # and never reads
                clients.append(hanging)

        assert generate(config, metrics=0, observers=[scraper], say=say).records == 11
        clients[0].setblocking(False)
        with pytest.raises(BlockingIOError):  # its connection is still open: the run's end did not wait for it
            clients[0].recv(1)
    assert len(scraper.found) == 12


def test_a_port_in_use_is_told_before_anything_is_prepared(tmp_path, config, monkeypatch):
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr("ragspec.run.generate.prepare", lambda *_: pytest.fail("prepared"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--metrics: 127.0.0.1:{port} cannot be used \(Address already in use"):
            generate(config, metrics=port)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("given", ["x", "", ":9400", "host:", "99999", "-1", "1.5", "9400:host"])
def test_what_is_no_port_is_refused(config, given):
    pytest.importorskip("prometheus_client")
    with pytest.raises(ConfigError, match="is not a valid port"):
        generate(config, metrics=given)


def test_a_port_may_have_a_host():
    assert address_of("65535") == ("127.0.0.1", 65535)
    assert address_of("[::1]:0") == ("::1", 0)


def test_a_scrape_counts_each_of_several_answers(config):
    pytest.importorskip("prometheus_client")
    scraper = Scraper()
    sampled = config.sampling.model_copy(update={"n": 3, "temperature": 1.0})
    generate(config.model_copy(update={"sampling": sampled}), metrics=0, observers=[scraper], say=scraper.say)
    assert scraper.found[-1]["ragspec_record_seconds_count",] == 33


def test_a_host_without_such_an_address_is_refused(config):
    pytest.importorskip("prometheus_client")
    with pytest.raises(ConfigError, match=r"^--metrics: 192\.0\.2\.1:0 cannot be used"):
        generate(config, metrics="192.0.2.1:0")


def test_without_its_library_metrics_name_the_extra(config, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r'ragspec\[metrics\]"'):
        generate(config, metrics=0)


# -- OpenTelemetry ---------------------------------------------------------------------------------


@pytest.fixture
def spans(monkeypatch):
    """Return what takes the spans of a provider that the program has set."""
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace as api
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(api, "get_tracer_provider", lambda: provider)
    return exporter


def test_a_run_and_its_records_are_spans(config, spans):
    generate(config, tracing=True)
    found = spans.get_finished_spans()
    (run,) = [span for span in found if span.name == "ragspec.run"]
    records = {span.attributes["ragspec.record.id"]: span for span in found if span.name == "ragspec.record"}
    assert len(records) == 12
    assert all(span.parent.span_id == run.context.span_id for span in found if span is not run)
    assert records["q7"].attributes["error.type"] == "BackendError"
    assert not records["q7"].status.is_ok
    one = records["q0"].attributes
    assert one["gen_ai.usage.output_tokens"] == one["ragspec.accepted_tokens"] + 5
    assert (run.attributes["ragspec.records"], run.attributes["ragspec.failed"]) == (11, 1)
    load, warm_up = (next(span for span in found if span.name == f"ragspec.{name}") for name in ("load", "warm_up"))
    assert load.start_time < load.end_time == warm_up.start_time


def test_a_run_that_fails_is_a_span_with_its_error(config, spans):
    class Breaks:
        def answered(self, result):
            raise ZeroDivisionError("why")

    with pytest.raises(ZeroDivisionError):
        generate(config, tracing=True, observers=[Breaks()])
    (run,) = [span for span in spans.get_finished_spans() if span.name == "ragspec.run"]
    assert (run.attributes["error.type"], run.status.description) == ("ZeroDivisionError", "why")


def test_a_span_has_no_secret_of_the_config(tmp_path, config, spans):
    secret = "s3cr3t-of-the-store"
    given = {**FAKE, "output": str(tmp_path / "out.jsonl")}
    given["input"] = {"path": str(config.input), "storage_options": {"password": secret}}

    class Breaks:
        def answered(self, result):
            raise ZeroDivisionError(f"login with {secret}")

    with pytest.raises(ModelError):
        generate(build_config(given), tracing=True, observers=[Breaks()])
    (run,) = [span for span in spans.get_finished_spans() if span.name == "ragspec.run"]
    assert "login with" in run.status.description
    assert secret not in run.to_json()
    assert secret not in (tmp_path / "out.stats.json").read_text()


def test_a_collector_that_says_nothing_costs_a_note(tmp_path, config, monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr("ragspec.run.tracing.FLUSH_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        summary = generate(config, tracing=True)
        assert "ragspec-tracing" in {thread.name for thread in threading.enumerate()}  # which nobody waits for
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 12
    assert "the OpenTelemetry collector did not accept 15 of 15 spans" in summary.notes


def test_an_exporter_that_is_not_known_is_refused(config, monkeypatch):
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ConfigError, match=r'^OTEL_TRACES_EXPORTER: "zipkin" is not known; choose one of otlp'):
        generate(config, tracing=True)


def test_without_its_library_tracing_names_the_extra(config, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r'ragspec\[tracing\]"'):
        generate(config, tracing=True)
