"""The joules of one run, noted in its totals while it goes on."""

from __future__ import annotations

import socket

from ragspec.config.run import RunConfig
from ragspec.host.energy import EnergyMeter
from ragspec.speculation.methods import FAKE
from ragspec.stats import Energy, RunSummary


class RunEnergy:
    """Meters this machine while it is entered. summary: gets `energy`, unless other machines answered too."""

    def __init__(self, config: RunConfig, summary: RunSummary) -> None:
        gpus = config.runner != FAKE and config.runner_args.get("device") != "cpu"
        self._meter = EnergyMeter(gpus=gpus, on_sample=self.update)
        self._summary = summary
        self._before: dict[str, float] | None = None  # joules when answering began

    def __enter__(self) -> None:
        self._meter.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.update()
        self._meter.__exit__(*exc)

    def begin_answering(self) -> None:
        """Note that the model is loaded."""
        self._before = self._meter.joules()

    def update(self) -> None:
        """Note what was used so far."""
        here = socket.gethostname()
        elsewhere = any(worker.host not in ("", here) for worker in self._summary.workers)
        # a counter that stands still, as virtual machines have them, is no reading
        run_j = {name: used for name, used in self._meter.joules().items() if used > 0}
        if not run_j or elsewhere:
            self._summary.energy = None
            return
        before = self._before
        answering_j = {} if before is None else {name: used - before[name] for name, used in run_j.items()}
        self._summary.energy = Energy(run_j, answering_j)
