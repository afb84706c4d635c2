"""`ragspec` in a process that has imported transformers already: a cold start takes eight seconds, this one none."""

import multiprocessing
import os
import subprocess
from pathlib import Path

from tests.processes import become_ragspec

TIMEOUT_S = 300
PRELOADED = ["torch", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)


def ragspec(folder, *args, env=None):
    """Run the command in `folder` and return a CompletedProcess. env: the variables of it and of all that it starts."""
    told = Path(folder) / "stdout.txt", Path(folder) / "stderr.txt"
    command = ["ragspec", *map(str, args)]
    child = CONTEXT.Process(target=_in, args=(dict(env or os.environ), folder, args, *told))
    child.start()
    child.join(TIMEOUT_S)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise subprocess.TimeoutExpired(command, TIMEOUT_S, *(path.read_text() for path in told))
    return subprocess.CompletedProcess(command, child.exitcode, *(path.read_text() for path in told))


def _in(env, *command):
    os.environ.clear()
    os.environ.update(env)
    become_ragspec(*command)
