"""`ragspec` in a child of this process, so that a thousand runs do not start a thousand interpreters."""

import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

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
        _be_ragspec(folder, said, told, [str(arg) for arg in args])
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return Ended(code, said.read_text(errors="replace"), told.read_text(errors="replace"), usage.ru_maxrss / 1024)


def _be_ragspec(folder, said, told, args):
    code = 70
    try:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, path in ((1, said), (2, told)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
        signal.alarm(PATIENCE_S)
        sys.argv = ["ragspec", *args]
        from ragspec.cli import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # what the command line lets through, its user sees as a traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def preload():
    """Import what every run needs, once."""
    import ragspec.cli
    import ragspec.cli.console
    import ragspec.cli.progress
    import ragspec.cli.tables
    import ragspec.run.session
    import ragspec.runners.fake
    import ragspec.runners.huggingface.runner
    import ragspec.runners.vllm.runner  # noqa: F401

    assert "torch" not in sys.modules
