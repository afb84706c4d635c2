"""What identifies a run in its stats file: config, runner, versions, hashes, seed; and the memory it took."""

from __future__ import annotations

import hashlib
import resource
import sys
from typing import Any

from ragspec import __version__
from ragspec.config.run import RunConfig
from ragspec.inputs.files import digest
from ragspec.runners.base import Runner

LIBRARIES = ("torch", "transformers", "vllm")


def about(config: RunConfig, runner: Runner) -> dict[str, Any]:
    """Return what identifies a run."""
    versions = {name: sys.modules[name].__version__ for name in LIBRARIES if name in sys.modules}
    return {
        "config": config.model_dump(mode="json"),
        "runner": runner.about(),
        "versions": {"ragspec": __version__, "python": sys.version.split()[0], **versions},
        "input_sha256": digest(config.input),
        "template_sha256": hashlib.sha256((config.prompt.template or "").encode()).hexdigest(),
        "seed": config.sampling.seed,
    }


def peak_memory_gib() -> float:
    """Return this process's largest resident size, or CUDA's peak allocation if that is larger."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform != "darwin" else 1 << 30)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        peak = max(peak, torch.cuda.max_memory_allocated() / (1 << 30))
    return peak
