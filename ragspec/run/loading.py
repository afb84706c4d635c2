"""What a run does before its first answer, and how long it still takes: seen from outside, so that no runner tells it.

    >>> loading = Loading(config); loading.text()
    'loading weights 0.3 of 0.5 GB, 0:05 so far, about 0:20 left'

How long it takes is what the same setting took here before (runner_choice.py). Limit: on systems without /proc, and
with workers on other machines, it names the model and nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ragspec.config.redaction import revealed
from ragspec.config.run import RunConfig
from ragspec.host.reading import Reading
from ragspec.models.resolve import downloaded_bytes, is_converted, weight_files
from ragspec.run.pace import clock
from ragspec.run.runner_choice import usual_start_s

LOOK_S = 0.5  # between two looks at the weights
# of the weights: what says something, and what counts as all, as some checkpoints have more than the model needs
BEGUN, READ = 0.05, 0.97


class Loading:
    """The loading of a config's model, from now on."""

    def __init__(self, config: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._began = self._looked_at = clock()
        self._read_since: float | None = None  # when weights began to be read
        self._usual_s: float | None = None
        self._reading: Reading | None = None
        self._warming_up = False
        self._doing = self._look()

    def warming_up(self) -> None:
        """Take note that the model is loaded."""
        self._warming_up = True

    def doing(self) -> str:
        """Return what is done now."""
        if self._warming_up:
            return "warming up"
        if (now := self._clock()) - self._looked_at >= LOOK_S:
            self._doing = self._look()
            self._looked_at = now
        return self._doing

    def left(self) -> str:
        """Return about how long it still takes, "" if that is not known."""
        if self._usual_s is None or self._read_since is None:
            return ""
        left_s = self._usual_s - (self._clock() - self._read_since)
        return f"about {clock(left_s)} left" if left_s >= 1 else ""

    def text(self) -> str:
        """Return all of it for people."""
        return ", ".join(filter(None, [self.doing(), f"{clock(self._clock() - self._began)} so far", self.left()]))

    def _look(self) -> str:
        model = self._config.model
        if model is None:
            return "starting"
        if self._reading is None:
            with suppress(OSError):  # deleted since
                self._reading = Reading(self._files(model)) if self._files(model) else None
        if self._reading is None:
            if so_far := downloaded_bytes(model):
                return f"downloading {model}, {_gb(so_far)} GB so far"
            return f"loading {model}" if is_converted(model) else f"converting {model}, once"
        done, total = self._reading.done, self._reading.total
        if done and self._read_since is None:
            self._read_since = self._clock()
            self._usual_s = usual_start_s(self._config)  # asks torch, which is imported by now
        if done < BEGUN * total:
            return f"loading {model} ({_gb(total)} GB of weights)"
        if done >= READ * total:
            return "starting the engine"
        return f"loading weights {_gb(done)} of {_gb(total)} GB"

    def _files(self, model: str) -> list[Path]:
        draft = self._config.speculation.draft_model
        own = weight_files(model, revealed(self._config.runner_args.get("revision")))
        return [*own, *(weight_files(draft) if own and draft else [])]


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"
