"""What this machine is, and how much of its memory is free. Nothing heavy is imported at the top."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

UNKNOWN = 8 << 30  # taken for free where the system does not tell
CGROUP = Path("/sys/fs/cgroup")
WIDEST = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE"}  # by the system's names for them


def machine() -> dict[str, Any]:
    """Return what a figure depends on: processor, cores, memory, GPUs (where torch is loaded)."""
    torch = sys.modules.get("torch")
    gpus = []
    if torch is not None and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.system(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(_memory() / (1 << 30), 1),
        "gpus": gpus,
    }


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def has_gpu() -> bool:
    """Return whether torch can compute on a GPU here."""
    import torch

    return torch.cuda.is_available()


def cpu_features() -> str:
    """Return what tells whether code built on one machine runs on another: the processor's instruction sets."""
    try:
        return _cpuinfo("flags", "Features")
    except OSError:
        return platform.processor()


def memory_bytes() -> int:
    """Return the memory of the system, or of its container where that is less; 0 where neither tells."""
    limit = _container_bytes()
    return _memory() if limit is None else min(_memory(), limit)


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def _container_bytes() -> int | None:
    """Return the memory that this process's container may take; None where there is no limit."""
    try:
        return int((CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # "max"
        return None


def free_bytes() -> int:
    """Return the memory that a process here may still take: the system's, or its container's where that is less."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return UNKNOWN
    limit = _container_bytes()
    if limit is not None:
        with suppress(OSError, KeyError, ValueError):
            counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
            used = int((CGROUP / "memory.current").read_text()) - int(counts["inactive_file"])  # files can be dropped
            free = min(free, max(0, limit - used))
    return free


def free_gpu_bytes() -> int:
    """Return the memory that is free on all GPUs together."""
    import torch

    return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))


def _processor() -> str:
    """Return the processor's name and its widest instructions: virtual machines call several generations the same."""
    name = ""
    with suppress(OSError):
        name = _cpuinfo("model name")
    name = name or platform.processor() or platform.machine()
    features = cpu_features().split()
    return ", ".join([name, *[what for flag, what in WIDEST.items() if flag in features][:1]])


def _cpuinfo(*names: str) -> str:
    """Return what the system says of its first processor under one of these names, "" for nothing. Raises OSError."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
