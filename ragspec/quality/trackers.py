"""An evaluation's figures sent to an experiment tracker: MLflow or Weights & Biases.

Both are set up by their own environment variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME; WANDB_PROJECT,
WANDB_MODE) and take the same flat figures. What they print goes to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec

from ragspec.errors import ConfigError, did_you_mean
from ragspec.quality.evaluate import FAILED, Evaluation


def figures_of(found: Evaluation) -> dict[str, float]:
    """Return the means with their intervals, and the differences from the other run."""
    groups = {"": found.scores, "_difference": found.differences}
    flat = {
        f"{name}{ending}{end}": value
        for ending, scores in groups.items()
        for name, one in scores.items()
        if name != FAILED  # which is a count below
        for end, value in (("", one.mean), ("_low", one.low), ("_high", one.high))
        if value is not None
    }
    return flat | {"records": float(found.records), "failed": float(found.failed)}


def _params(found: Evaluation) -> dict[str, str]:
    gates = "; ".join(f"{verdict.gate.text}: {verdict.outcome}" for verdict in found.verdicts)
    return {"answers": found.answers, "against": found.other or "", "gates": gates}


def _mlflow(figures: Mapping[str, float], found: Evaluation) -> None:
    import mlflow

    with mlflow.start_run():
        mlflow.set_tags(_params(found))
        mlflow.log_metrics(dict(figures))


def _wandb(figures: Mapping[str, float], found: Evaluation) -> None:
    import wandb

    with wandb.init(config=_params(found)) as run:
        run.log(dict(figures))


TRACKERS: dict[str, Callable[[Mapping[str, float], Evaluation], None]] = {"mlflow": _mlflow, "wandb": _wandb}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is not known or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f'--log-to: "{name}" is not known{did_you_mean(name, TRACKERS)}')
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # without an origin: a folder of that name, such as wandb's own
            raise ConfigError(f'--log-to {name} needs {name}: pip install "ragspec[{name}]"')


def track(found: Evaluation, names: Sequence[str]) -> None:
    """Send an evaluation's figures to these trackers. Their own errors pass."""
    for name in names:
        with redirect_stdout(sys.stderr):
            TRACKERS[name](figures_of(found), found)
