"""What the machine says of itself."""

import os
from types import SimpleNamespace

import pytest

from ragspec.host import machine


def test_free_memory_is_some_and_no_more_than_there_is():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine.free_bytes() <= total


def test_a_container_limits_free_memory_but_its_file_cache_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 400000\n")
    assert machine.free_bytes() == 700_000


def test_a_container_without_limit_has_the_systems_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_bytes() > 1_000_000


def test_the_machine_is_named():
    about = machine.machine()
    assert about["cores"] >= 1
    assert about["processor"]
    assert about["memory_gib"] > 0


@pytest.mark.parametrize(
    ("features", "ending"),
    [("avx2 avx512f", ", AVX-512"), ("avx avx2 fma", ", AVX2"), ("amx_tile avx2 avx512f", ", AMX"), ("fpu sse2", "")],
)
def test_a_processor_is_told_by_its_widest_instructions_too(features, ending, monkeypatch):
    monkeypatch.setattr(machine, "cpu_features", lambda: "")
    plain = machine.machine()["processor"]
    monkeypatch.setattr(machine, "cpu_features", lambda: features)
    assert machine.machine()["processor"] == plain + ending


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs of 80 GiB, of which the driver knows the second and the third; returns the numbers torch was asked."""
    import torch

    asked = []

    def mem_get_info(index):
        asked.append(index)
        return 7 << 30, 80 << 30

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"0000-{i}", total_memory=80 << 30)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    return asked


def driver(folder, text, monkeypatch):
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{text}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.slow
def test_the_driver_is_asked_for_free_memory_as_asking_torch_takes_some(gpus, tmp_path, monkeypatch):
    driver(tmp_path, "GPU-0000-2, 4096\\nGPU-0000-1, 2048\\n", monkeypatch)
    assert machine.gpu_memory() == [(7 << 30, 80 << 30), (2 << 30, 80 << 30), (4 << 30, 80 << 30)]
    assert gpus == [0]
    assert machine.free_gpu_bytes(2) == 9 << 30


@pytest.mark.slow
@pytest.mark.parametrize("text", ["Failed to initialize NVML", "GPU-0000-1, [N/A]"])
def test_torch_is_asked_where_the_driver_has_no_answer(text, gpus, tmp_path, monkeypatch):
    driver(tmp_path, text, monkeypatch)
    assert machine.free_gpu_bytes() == 21 << 30
    assert gpus == [0, 1, 2]


def test_peak_memory_has_what_was_used_at_some_time():
    before, on_gpus = machine.peak_memory()
    used = bytearray(96 << 20)
    used[:: 1 << 12] = b"1" * len(used[:: 1 << 12])
    del used
    assert machine.peak_memory()[0] >= max(before, 96 << 20)
    assert on_gpus == 0
