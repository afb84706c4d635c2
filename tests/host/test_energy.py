"""Joules from counters: a fake folder of RAPL's, a stand-in for NVML, and machines that tell nothing."""

import json
import socket
import sys
from threading import Event
from types import SimpleNamespace

import pytest

from ragspec.config.load import build_config
from ragspec.host import energy
from ragspec.host.energy import EnergyMeter
from ragspec.run.energy import RunEnergy
from ragspec.run.generate import generate
from ragspec.run.local import Pipeline
from ragspec.stats import RunSummary, WorkerSummary
from tests.conftest import write_jsonl

SPAN = 262_143_328_850  # microjoules


class Powercap:
    """A folder as Linux has it: zones with a name and counters."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()

    def set(self, zone, joules, name=None, span=SPAN):
        path = self.folder / zone
        path.mkdir(exist_ok=True)
        if name is not None:
            (path / "name").write_text(f"{name}\n")
            (path / "max_energy_range_uj").write_text(f"{span}\n")
        (path / "draft").write_text(f"{round(joules * 1e6)}\n")
        (path / "draft").replace(path / "energy_uj")  # a reader sees the whole number


@pytest.fixture
def powercap(tmp_path):
    found = Powercap(tmp_path / "powercap")
    found.set("intel-rapl:0", 100.0, "package-0")
    found.set("intel-rapl:0:0", 40.0, "core")  # a part of the package
    found.set("intel-rapl:0:1", 10.0, "dram")
    found.set("intel-rapl:1", 200.0, "package-1")
    found.set("intel-rapl:2", 900.0, "psys")  # all of the machine
    found.set("intel-rapl-mmio:0", 100.0, "package-0")  # the same once more
    return found


def test_joules_are_counted_by_domain_and_once(powercap):
    with EnergyMeter(powercap=powercap.folder) as meter:
        for zone, joules in (("intel-rapl:0", 150.0), ("intel-rapl:0:0", 80.0), ("intel-rapl:0:1", 12.5)):
            powercap.set(zone, joules)
        powercap.set("intel-rapl:2", 999.0)
        powercap.set("intel-rapl-mmio:0", 150.0)
        assert meter.joules() == pytest.approx({"package-0": 50.0, "dram-0": 2.5, "package-1": 0.0})


def test_a_counter_that_wraps_goes_on(powercap):
    powercap.set("intel-rapl:0", SPAN * 1e-6 - 30.0)
    with EnergyMeter(powercap=powercap.folder) as meter:
        powercap.set("intel-rapl:0", 20.0)
        assert meter.joules()["package-0"] == pytest.approx(50.0, abs=1e-3)
        powercap.set("intel-rapl:0", 25.0)
        assert meter.joules()["package-0"] == pytest.approx(55.0, abs=1e-3)
        powercap.set("intel-rapl:0", 5.0)
        assert meter.joules()["package-0"] == pytest.approx(35.0 + SPAN * 1e-6, abs=1e-3)


def test_counters_are_read_now_and_then_so_that_no_wrap_is_missed(powercap, monkeypatch):
    monkeypatch.setattr(energy, "SAMPLE_S", 0.0)
    seen, enough = [], Event()

    def sampled():
        seen.append(None)
        if len(seen) == 1:  # wrapped, which the first and the last reading alone do not tell
            powercap.set("intel-rapl:0", 1.0)
        if len(seen) == 3:
            enough.set()

    powercap.set("intel-rapl:0", 50.0)
    meter = EnergyMeter(powercap=powercap.folder, on_sample=sampled)
    with meter:
        enough.wait()
        powercap.set("intel-rapl:0", 60.0)
    assert meter.joules()["package-0"] == pytest.approx(10.0 + SPAN * 1e-6, abs=1e-3)


@pytest.mark.parametrize("broken", ["missing", "no number", "a folder"])
def test_a_domain_that_cannot_be_read_is_absent(powercap, broken):
    path = powercap.folder / "intel-rapl:0" / "energy_uj"
    path.unlink()
    if broken == "no number":
        path.write_text("??")
    if broken == "a folder":
        path.mkdir()
    with EnergyMeter(powercap=powercap.folder) as meter:
        assert sorted(meter.joules()) == ["dram-0", "package-1"]


def test_a_domain_that_fails_later_is_absent_from_then_on(powercap):
    with EnergyMeter(powercap=powercap.folder) as meter:
        powercap.set("intel-rapl:1", 230.0)
        (powercap.folder / "intel-rapl:0" / "energy_uj").unlink()
        assert meter.joules() == pytest.approx({"dram-0": 0.0, "package-1": 30.0})
        powercap.set("intel-rapl:0", 500.0)
        assert "package-0" not in meter.joules()


def test_a_machine_without_counters_says_nothing(tmp_path):
    with EnergyMeter(powercap=tmp_path / "none", gpus=True) as meter:
        assert meter.joules() == {}


def test_a_counter_without_a_span_that_falls_was_reset():
    readings = iter([50.0, 20.0, 25.0])
    counter = energy.Counter("gpu-0", lambda: next(readings), last=40.0)
    for used in (10.0, 10.0, 15.0):
        counter.update()
        assert counter.used == used


def test_a_counter_that_falls_by_more_than_its_span_takes_nothing_back():
    counter = energy.Counter("package-0", lambda: 1.0, span=10.0, last=40.0, used=5.0)
    counter.update()
    assert counter.used == 5.0


def test_a_zone_of_the_same_name_counts_once(powercap):
    powercap.set("intel-rapl:3", 100.0, "package-0")
    with EnergyMeter(powercap=powercap.folder) as meter:
        powercap.set("intel-rapl:0", 107.0)
        assert meter.joules()["package-0"] == pytest.approx(7.0)


# -- GPUs ------------------------------------------------------------------------------------------


@pytest.fixture
def nvml(monkeypatch):
    """Stand in for pynvml, with two GPUs."""

    class NVMLError(Exception):
        pass

    millijoules = {0: 5000, 1: 7000}

    def total(handle):
        if millijoules[handle] is None:
            raise NVMLError("Not Supported")
        return millijoules[handle]

    found = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(millijoules),
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetHandleByUUID={"GPU-b": 1}.__getitem__,
        nvmlDeviceGetTotalEnergyConsumption=total,
        millijoules=millijoules,
    )
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, {"gpu-0": 1.0, "gpu-1": 2.0}), ("1", {"gpu-0": 2.0}), ("GPU-b", {"gpu-0": 2.0}), ("", {})],
)
def test_visible_gpus_are_counted(tmp_path, nvml, monkeypatch, visible, names):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with EnergyMeter(powercap=tmp_path, gpus=True) as meter:
        nvml.millijoules.update({0: 6000, 1: 9000})
        assert meter.joules() == names
    with EnergyMeter(powercap=tmp_path) as meter:
        assert meter.joules() == {}


def test_a_gpu_that_does_not_tell_is_absent(tmp_path, nvml, monkeypatch):
    nvml.millijoules[0] = None
    with EnergyMeter(powercap=tmp_path, gpus=True) as meter:
        assert meter.joules() == {"gpu-1": 0.0}

    def no_driver():
        raise nvml.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", no_driver)
    with EnergyMeter(powercap=tmp_path, gpus=True) as meter:
        assert meter.joules() == {}


@pytest.mark.parametrize(
    ("runner", "device", "counts"), [("hf", "cuda", True), ("hf", "cpu", False), ("fake", "", False)]
)
def test_gpus_count_where_they_may_answer(tmp_path, nvml, monkeypatch, runner, device, counts):
    monkeypatch.setattr("ragspec.run.energy.EnergyMeter", lambda **given: EnergyMeter(**given, powercap=tmp_path))
    summary = RunSummary()
    with RunEnergy(SimpleNamespace(runner=runner, runner_args={"device": device} if device else {}), summary):
        nvml.millijoules[0] = 6000
    assert (summary.energy is not None) == counts


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": f"q{i}", "query": f"question {i}"} for i in range(5)])
    return build_config({"runner": "fake", "input": source, "output": str(tmp_path / "out.jsonl")})


class Uses:
    """Uses ten joules with each record."""

    def __init__(self, powercap):
        self.powercap, self.joules = powercap, 100.0

    def answered(self, result):
        self.joules += 10.0
        self.powercap.set("intel-rapl:0", self.joules)


def test_the_statistics_of_a_run_have_its_joules(tmp_path, powercap, config, monkeypatch):
    monkeypatch.setattr(
        "ragspec.run.energy.EnergyMeter", lambda **given: EnergyMeter(**given, powercap=powercap.folder)
    )
    summary = generate(config, observers=[Uses(powercap)])
    found = json.loads((tmp_path / "out.stats.json").read_text())["energy"]
    assert found["domains_j"] == {"package-0": 50.0}  # what stands still is no reading
    assert (found["run_j"], found["answering_j"], found["j_per_record"]) == (50.0, 50.0, 10.0)
    assert found["j_per_output_token"] == pytest.approx(50 / summary.output_tokens, abs=1e-4)


def test_loading_is_no_answering_and_workers_here_are_told(powercap, config, monkeypatch):
    monkeypatch.setattr(
        "ragspec.run.energy.EnergyMeter", lambda **given: EnergyMeter(**given, powercap=powercap.folder)
    )
    summary = RunSummary(workers=[WorkerSummary(name="0", host=socket.gethostname())])
    metered = RunEnergy(config, summary)
    with metered:
        powercap.set("intel-rapl:0", 120.0)
        metered.begin_answering()
        powercap.set("intel-rapl:0", 130.0)
    assert summary.energy.run_j == pytest.approx({"package-0": 30.0})
    assert summary.energy.answering_j == pytest.approx({"package-0": 10.0})


def test_a_run_on_a_machine_that_tells_nothing_has_no_energy(tmp_path, config):
    summary = generate(config)
    assert summary.energy is None
    assert "energy" not in json.loads((tmp_path / "out.stats.json").read_text())


def test_workers_on_other_machines_are_not_told_by_this_one(powercap, config, monkeypatch):
    summary = RunSummary(workers=[WorkerSummary(name="0", host="elsewhere")])
    monkeypatch.setattr(
        "ragspec.run.energy.EnergyMeter", lambda **given: EnergyMeter(**given, powercap=powercap.folder)
    )
    metered = RunEnergy(config, summary)
    with metered:
        metered.begin_answering()
        powercap.set("intel-rapl:0", 130.0)
    assert summary.energy is None
    summary.workers = []
    metered.update()
    assert summary.energy.run_j == pytest.approx({"package-0": 30.0})


def test_a_pipeline_has_the_joules_of_each_call(powercap, config, monkeypatch):
    monkeypatch.setattr(
        "ragspec.run.energy.EnergyMeter", lambda **given: EnergyMeter(**given, powercap=powercap.folder)
    )
    with Pipeline(config) as pipeline:
        for _ in pipeline.answers([{"query": "why?"}]):
            powercap.set("intel-rapl:1", 207.0)
        assert pipeline.summary.energy.answering_j == pytest.approx({"package-1": 7.0})
