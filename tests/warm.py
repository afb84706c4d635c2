"""`ragspec` in a process that has imported transformers already: a cold start takes eight seconds, this one none."""

import multiprocessing
import os
import subprocess
import sys
import traceback
from pathlib import Path

TIMEOUT_S = 300
PRELOADED = ["torch", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)


def ragspec(folder, *args, env=None):
    """Run the command in `folder` and return a CompletedProcess. env: the variables of it and of all that it starts."""
    told = Path(folder) / "stdout.txt", Path(folder) / "stderr.txt"
    command = ["ragspec", *map(str, args)]
    child = CONTEXT.Process(target=_be_ragspec, args=(str(folder), command, told, dict(env or os.environ)))
    child.start()
    child.join(TIMEOUT_S)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise subprocess.TimeoutExpired(command, TIMEOUT_S, *(path.read_text() for path in told))
    return subprocess.CompletedProcess(command, child.exitcode, *(path.read_text() for path in told))


def _be_ragspec(folder, command, told, env):
    code = 70
    try:
        os.environ.clear()
        os.environ.update(env)
        os.chdir(folder)
        for descriptor, path in zip((1, 2), told, strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.argv = command
        from ragspec.cli import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # what the command line lets through, its user sees as a traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
