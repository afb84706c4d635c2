"""A few faults of each kind; `python -m tests.campaign` has them by the hundred."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

FEW = {
    "lines": 400,
    "configs": 30,
    "archives": 10,
    "numbers": 400,
    "wrappers": 2000,
    "parts": 2,
    "workers": 1,
    "faults": 2,
    "templates": 100,
}


@pytest.mark.wide
@pytest.mark.parametrize(("part", "count"), FEW.items())
def test_a_few_faults_at_random_break_no_guarantee(part, count, tiny):
    command = [sys.executable, "-m", "tests.campaign", "--only", part, f"--{part}", str(count), "--seed", "1"]
    command += ["--model", tiny]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert f'"part": "{part}"' in done.stdout
