"""What the machine says of itself."""

import os

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
