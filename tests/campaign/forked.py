"""`ragspec` in a child of this process, so that a thousand runs do not start a thousand interpreters."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.processes import become_ragspec

PATIENCE_S = 120


@dataclass(frozen=True)
class Ended:
    """How a run ended. code: the exit code; below 0 the signal that killed it."""

    code: int
    stdout: str
    stderr: str
    peak_mib: float

    def lines(self):
        """Return what it said, line by line."""
        return [line for line in self.stderr.splitlines() if line.strip()]


def ragspec(folder: Path, *args) -> Ended:
    """Run the command in `folder` and return how it ended. This process must have no threads."""
    said, told = folder / "stdout.txt", folder / "stderr.txt"
    child = os.fork()
    if not child:
        signal.alarm(PATIENCE_S)
        become_ragspec(folder, args, said, told)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return Ended(code, said.read_text(errors="replace"), told.read_text(errors="replace"), usage.ru_maxrss / 1024)


def preload():
    """Import what every run needs, once."""
    import ragspec.cli
    import ragspec.cli.tables
    import ragspec.run.session
    import ragspec.runners.fake
    import ragspec.runners.huggingface.runner
    import ragspec.runners.vllm.runner  # noqa: F401

    assert "torch" not in sys.modules
