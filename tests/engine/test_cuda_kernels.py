"""FlexAttention's kernels for GPUs, without one: they compile, fit in shared memory, and compute what they should."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from ragspec.engine.backends.paged_attention import TILE
from tests.conftest import ROOT, wide
from tests.engine.cuda_kernels import CASES, STEPS, TORCH, TRITON


def installed(name):
    try:
        return ".".join(version(name).split(".")[:2])
    except PackageNotFoundError:
        return "none"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        (installed("torch"), installed("triton")) != (TORCH, TRITON), reason=f"needs torch {TORCH}, Triton {TRITON}"
    ),
]


def run(how, cases, place, **env):
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.cuda_kernels", how, *map(str, cases)]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"), "TRITON_CACHE_DIR": str(place / "triton")}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | caches | env, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases)
    return found


@pytest.mark.parametrize("cases", [[0], *wide(range(1, len(CASES)))])
def test_attention_compiles_for_gpus(cases, tmp_path):
    """Also where heads are too wide for the tiles that torch chooses."""
    for case, notes in zip(cases, run("compile", cases, tmp_path), strict=True):
        assert notes == [], CASES[case]


def test_kernels_compute_attention_over_the_rows_blocks(tmp_path):
    """Decoding, drafts and prompts; windows, caps, sinks, prefixes that rows share, and small tiles."""
    for step, found in zip(STEPS, run("interpret", range(len(STEPS)), tmp_path, TRITON_INTERPRET="1"), strict=True):
        assert found["notes"] == [], step
        assert any(name.startswith("triton_tem_") for name in found["ran"]), step
        assert found["difference"] < 1e-5, step
    assert {step.tokens for step in STEPS} == {1, 4, TILE}
