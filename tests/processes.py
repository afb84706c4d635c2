"""Which processes belong to a test: others may run beside it."""

import os
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
