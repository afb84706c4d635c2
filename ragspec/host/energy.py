"""Joules that this machine's processors and GPUs take, where the machine tells.

    >>> with EnergyMeter() as meter:
    ...     answer()
    >>> meter.joules()
    {'package-0': 812.4, 'dram': 61.0}

Processors are read from RAPL's counters (/sys/class/powercap, often readable by root only), GPUs from NVML (pynvml, of
nvidia-ml-py). A domain that cannot be read is absent; nothing stands for it. Limits: counters are of whole devices,
with all that runs on them; RAPL's wrap around, which is noticed if they are read more often than they do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Self

POWERCAP = Path("/sys/class/powercap")
SAMPLE_S = 30.0  # a counter of 32 bits, of 15 microjoules a unit, wraps after two minutes at 500 W
MICRO, MILLI = 1e-6, 1e-3


@dataclass(slots=True)
class Counter:
    """A counter of joules. read: raises OSError where it cannot be read. span: the value at which it wraps, or None."""

    name: str
    read: Callable[[], float]
    span: float | None = None
    last: float = 0.0
    used: float = 0.0

    def update(self) -> None:
        """Add what was used since the last reading."""
        now = self.read()
        step = now - self.last
        if step < 0:
            step = step + self.span if self.span is not None else 0.0  # without a span: it was reset
        self.used, self.last = self.used + max(0.0, step), now


class EnergyMeter:
    """Joules by domain since `with` began. gpus: also those of visible GPUs. on_sample: called now and then."""

    def __init__(
        self, *, gpus: bool = False, powercap: Path = POWERCAP, on_sample: Callable[[], None] = lambda: None
    ) -> None:
        self._gpus = gpus
        self._powercap = powercap
        self._on_sample = on_sample
        self._counters: list[Counter] = []
        self._lock = Lock()
        self._ended = Event()

    def __enter__(self) -> Self:
        found = [*_processors(self._powercap), *(_gpus() if self._gpus else ())]
        for counter in found:
            with suppress(OSError):
                counter.last = counter.read()
                self._counters.append(counter)
        if self._counters:
            Thread(target=self._sample, name="ragspec-energy", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()

    def joules(self) -> dict[str, float]:
        """Return the joules of each domain so far; a domain whose counter has failed is absent from then on."""
        with self._lock:
            for counter in list(self._counters):
                try:
                    counter.update()
                except OSError:
                    self._counters.remove(counter)
            return {counter.name: counter.used for counter in self._counters}

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.joules()
            self._on_sample()


def _processors(powercap: Path) -> Iterator[Counter]:
    """Yield the counters of processors and of memory beside them.

    Zones of other kinds are parts of these (core, uncore), the whole of them (psys), or the same once more (mmio).
    """
    taken: set[str] = set()
    for zone in sorted(powercap.glob("intel-rapl:*")):  # AMD's processors have these names too
        try:
            name = (zone / "name").read_text().strip()
            span = int((zone / "max_energy_range_uj").read_text()) * MICRO
        except (OSError, ValueError):
            continue
        if not name.startswith("package") and name != "dram":
            continue
        if name == "dram":
            name = f"dram-{zone.name.split(':')[1]}"
        if name not in taken:
            taken.add(name)
            yield Counter(name, lambda path=zone / "energy_uj": _microjoules(path), span)  # type: ignore[misc]


def _microjoules(path: Path) -> float:
    try:
        return int(path.read_text()) * MICRO
    except ValueError as error:
        raise OSError(f"{path}: {error}") from None


def _gpus() -> Iterator[Counter]:
    """Yield the counters of the GPUs that CUDA programs see here."""
    try:
        import pynvml
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
        for number, handle in enumerate(_visible(pynvml)):
            yield Counter(f"gpu-{number}", lambda handle=handle: _millijoules(pynvml, handle))  # type: ignore[misc]
    except pynvml.NVMLError:  # no driver
        return


def _visible(nvml: Any) -> list[Any]:
    """Return the handles of the GPUs in CUDA_VISIBLE_DEVICES, by number or id; of all if it is not set."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    words = [word.strip() for word in given.split(",") if word.strip()]
    by_number, by_id = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    return [by_number(int(word)) if word.isdecimal() else by_id(word) for word in words]


def _millijoules(nvml: Any, handle: Any) -> float:
    try:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * MILLI
    except nvml.NVMLError as error:  # an older GPU
        raise OSError(str(error)) from None
