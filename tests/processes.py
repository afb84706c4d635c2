"""Processes of a test: started so that they can be interrupted, and told from others that run beside it."""

import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path


def actors(root=None):
    """Return the processes of workers whose cluster the process `root`, by default this one, has started."""
    root = root or os.getpid()
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_worker(pid) and is_below(pid, root)]


def is_worker(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::Worker")
    except OSError:
        return False


def is_below(pid, root):
    while pid > 1:
        if pid == root:
            return True
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        pid = int(stat.rpartition(")")[2].split()[1])
    return False


def start_interruptible(command, **more):
    """Start a process that can be interrupted, also where this one was started with SIGINT ignored (by `&`, say)."""
    default = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    return subprocess.Popen(command, **{"stderr": subprocess.PIPE, "text": True, **more}, preexec_fn=default)


def become_ragspec(folder, args, stdout, stderr):
    """Be the command for the rest of this process, which was forked for it. stdout, stderr: files."""
    code = 70
    try:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, path in ((1, stdout), (2, stderr)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
        sys.argv = ["ragspec", *map(str, args)]
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


def family(root):
    """Return the processes that `root` has started, themselves or through others: their numbers, and when they began.

    Where a number is given to another process later on, it began at another time.
    """
    born = {int(pid): birth(pid) for pid in os.listdir("/proc") if pid.isdigit()}
    return {pid: when for pid, when in born.items() if when and pid != root and is_below(pid, root)}


def birth(pid):
    """Return when a process began; None if there is none, or only what its parent has not asked for yet."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
