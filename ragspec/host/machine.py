"""The machine and its free memory. Imports nothing heavy at module level."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

UNKNOWN_FREE_BYTES = 8 << 30  # assumed free if the system does not say
DRIVER_S = 20.0  # for an answer of the GPUs' driver
CGROUP = Path("/sys/fs/cgroup")
INSTRUCTION_SETS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE"}  # by CPU flag, widest first


def machine() -> dict[str, Any]:
    """Return what performance depends on: processor, cores, memory, and GPUs if torch is loaded."""
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
    """Return the versions of the installed ones of these packages."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def has_gpu() -> bool:
    """Return whether torch can compute on a GPU here."""
    import torch

    return torch.cuda.is_available()


def gpu_capability() -> tuple[int, int]:
    """Return the compute capability of the first GPU; (0, 0) without one of CUDA's."""
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return 0, 0
    return torch.cuda.get_device_capability(0)


def cpu_features() -> str:
    """Return the processor's instruction sets, which decide whether native code built elsewhere runs here."""
    try:
        return _cpuinfo("flags", "Features")
    except OSError:
        return platform.processor()


def memory_bytes() -> int:
    """Return the memory of the system, or of its container if that is less; 0 if unknown."""
    limit = _container_bytes()
    return _memory() if limit is None else min(_memory(), limit)


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def _container_bytes() -> int | None:
    """Return the container's memory limit; None if there is none."""
    try:
        return int((CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # "max"
        return None


def free_bytes() -> int:
    """Return the memory still available to a process: the system's, or its container's if that is less."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return UNKNOWN_FREE_BYTES
    limit = _container_bytes()
    if limit is not None:
        with suppress(OSError, KeyError, ValueError):
            counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
            used = int((CGROUP / "memory.current").read_text()) - int(counts["inactive_file"])  # reclaimable page cache
            free = min(free, max(0, limit - used))
    return free


def free_gpu_bytes(count: int | None = None) -> int:
    """Return the free memory of the first `count` GPUs together; None: of all."""
    return sum(free for free, _ in gpu_memory(count))


def gpu_memory(count: int | None = None) -> list[tuple[int, int]]:
    """Return the free and all bytes of the first `count` GPUs, by torch's numbers; None: of all.

    The driver is asked first: where torch is asked, it takes some of that memory, on each of them.
    """
    import torch

    known, found = _free_by_driver(), []
    for index in range(torch.cuda.device_count() if count is None else count):
        about = torch.cuda.get_device_properties(index)
        free = known.get(str(getattr(about, "uuid", "")).removeprefix("GPU-"))
        # unknown: another vendor's, a part of one, or without the driver's tool
        found.append((torch.cuda.mem_get_info(index)[0] if free is None else free, about.total_memory))
    return found


def _free_by_driver() -> dict[str, int]:
    """Return the free bytes of NVIDIA's GPUs by UUID; nothing without their driver's tool."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_S, check=True).stdout
        lines = [line.split(",") for line in shown.splitlines() if line.strip()]
        return {name.strip().removeprefix("GPU-"): int(mebibytes) << 20 for name, mebibytes in lines}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def peak_memory() -> tuple[int, int]:
    """Return this process's peak bytes: resident, and of torch on GPUs that it has used."""
    resident = _peak_resident()
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return resident, 0
    return resident, sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))


def _peak_resident() -> int:
    with suppress(OSError), open("/proc/self/status") as status:  # Linux, whose ru_maxrss has the parent's memory, too
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _processor() -> str:
    """Return the processor's name and widest instruction set, since VMs give several generations the same name."""
    name = ""
    with suppress(OSError):
        name = _cpuinfo("model name")
    name = name or platform.processor() or platform.machine()
    features = cpu_features().split()
    return ", ".join([name, *[what for flag, what in INSTRUCTION_SETS.items() if flag in features][:1]])


def _cpuinfo(*names: str) -> str:
    """Return the first processor's value of one of these fields, "" if it has none. Raises OSError."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
