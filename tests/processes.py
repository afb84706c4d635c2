"""Processes of a test: started so that they can be interrupted, and told from others that run beside it."""

import os
import signal
import subprocess
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
