"""The kernels' library: built once, kept, and done without where it cannot be built."""

import shutil
import time
from dataclasses import replace

import pytest
import torch

from ragspec.engine.model import loaded as prepared
from ragspec.engine.model import self_check as worth
from ragspec.engine.native.kernels import build
from ragspec.host import compiler as host_compiler
from ragspec.host.compiler import Unbuilt
from tests.engine.test_linear import llama

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A cache of its own, nothing remembered, and a compiler that is quick as it improves nothing."""
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", compiler(tmp_path / "quick++", 'exec g++ "$@" -O0'))
    build.cache_clear()
    yield tmp_path / "cache"
    build.cache_clear()


def compiler(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_library_is_built_once_and_kept(fresh):
    build(32)
    (kept,) = (fresh / "native").iterdir()
    assert kept.suffix == ".so"
    before = kept.stat()
    build.cache_clear()
    assert build(32).head == 32
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_heads_have_libraries_of_their_own(fresh):
    assert (build(32).head, build(64).head, build(20).head) == (32, 64, 8)
    assert len(list((fresh / "native").iterdir())) == 3


def test_no_compiler_is_a_note_and_torch_computes(fresh, monkeypatch):
    monkeypatch.setattr(host_compiler.shutil, "which", lambda name: None)
    notes = []
    model = prepared.prepare(llama(), notes)
    assert model.kernels is None
    assert notes == ["kernels: using torch's slower kernels, because no C++ compiler (g++) was found"]


def test_a_compiler_that_fails_is_named(fresh, tmp_path, monkeypatch):
    failing = compiler(
        tmp_path / "broken++", 'test "$1" = --version && echo broken 1.0 && exit 0; echo "no luck" >&2; exit 1'
    )
    monkeypatch.setenv("CXX", failing)
    with pytest.raises(Unbuilt, match=r"broken\+\+ failed: no luck"):
        build(32)


def test_a_compiler_that_writes_nonsense_is_no_harm(fresh, tmp_path, monkeypatch):
    text = 'test "$1" = --version && exit 0; for last; do :; done; echo nonsense > "$last"'
    monkeypatch.setenv("CXX", compiler(tmp_path / "odd++", text))
    with pytest.raises(Unbuilt, match="cannot be loaded"):
        build(32)


def test_a_cache_that_cannot_be_written_is_done_without(fresh):
    fresh.write_text("a file")
    kernels = build(32)
    weight, x = torch.randn(40, 24), torch.randn(3, 24)
    assert torch.allclose(kernels.linear(x, kernels.pack(weight), 40, None), x @ weight.T, atol=1e-5)


def test_a_damaged_library_is_built_anew(fresh, monkeypatch):
    def fail(path):
        raise OSError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(host_compiler.ctypes, "CDLL", fail)  # what a process has loaded once, it does not open again
        with pytest.raises(Unbuilt, match="not now"):
            build(32)
    (kept,) = (fresh / "native").iterdir()
    kept.write_bytes(b"nothing")
    assert build(32).head == 32
    assert kept.stat().st_size > 10_000


def unmerged(work):
    """Each token's first part is all that counts."""
    return replace(work, parts=torch.stack([work.parts[:, 0], work.parts[:, 1].clamp_max(work.parts[:, 0] + 1)], 1))


def from_the_next_row(work):
    """Pieces that begin further on are read from the row after."""
    pieces = work.pieces.clone()
    pieces[:, 0] = torch.where(pieces[:, 1] == worth.HELD, (pieces[:, 0] + 1) % 3, pieces[:, 0])
    return replace(work, pieces=pieces)


@pytest.mark.parametrize("spoilt", [unmerged, from_the_next_row])
def test_attention_that_a_compiler_made_wrong_is_left_to_torch(monkeypatch, spoilt):
    kernels = build(32)
    assert worth.attention_is_exact(kernels)
    attend = kernels.attend
    monkeypatch.setattr(
        kernels, "attend", lambda q, k, v, scale, work, out, cap: attend(q, k, v, scale, spoilt(work), out, cap)
    )
    assert not worth.attention_is_exact(kernels)
    notes = []
    monkeypatch.setattr(prepared, "attention_is_exact", lambda kernels: False)
    assert prepared.prepare(llama(), notes).kernels is None
    assert notes == ["kernels: attention is torch's own, because our compiled kernels give different results"]


def test_attention_that_a_compiler_made_slow_is_left_to_torch(monkeypatch):
    kernels = build(32)
    assert worth.kernels_are_faster(kernels)
    attend = kernels.attend

    def slow(*given):
        time.sleep(0.02)
        attend(*given)

    monkeypatch.setattr(kernels, "attend", slow)
    assert not worth.kernels_are_faster(kernels)
    notes = []
    monkeypatch.setattr(prepared, "kernels_are_faster", lambda kernels: False)
    assert prepared.prepare(llama(), notes).kernels is None
    assert notes == ["kernels: attention is torch's own, which is faster here than our compiled kernels"]
