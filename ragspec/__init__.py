"""Batch RAG generation with speculative decoding.

    import ragspec

    config = ragspec.load_config({"model": "demo", "speculation": {"method": "context"}})
    with ragspec.Pipeline(config) as pipeline:
        for answer in pipeline.answers([{"query": "Who wrote it?", "contexts": ["Ann wrote it."]}]):
            print(answer["output"])

These names are the public API; everything else may change. Imports are lazy: a name's module loads on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragspec.config.run import RunConfig
    from ragspec.errors import ConfigError, ModelError, RagspecError
    from ragspec.run.generate import generate
    from ragspec.run.local import Pipeline
    from ragspec.speculation.drafters.base import Draft, Drafter, RowDrafter
    from ragspec.speculation.methods import register as register_drafter
    from ragspec.stats import RunSummary

__version__ = "0.2.0"
__all__ = [
    "ConfigError",
    "Draft",
    "Drafter",
    "ModelError",
    "Pipeline",
    "RagspecError",
    "RowDrafter",
    "RunConfig",
    "RunSummary",
    "generate",
    "load_config",
    "register_drafter",
]
_MODULES = {
    **dict.fromkeys(["ConfigError", "ModelError", "RagspecError"], "ragspec.errors"),
    **dict.fromkeys(["Draft", "Drafter", "RowDrafter"], "ragspec.speculation.drafters.base"),
    "generate": "ragspec.run.generate",
    "Pipeline": "ragspec.run.local",
    "RunConfig": "ragspec.config.run",
    "RunSummary": "ragspec.stats",
    "register_drafter": "ragspec.speculation.methods",
}


def load_config(source: str | PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Return the checked config of a YAML file, or of a mapping with the same keys.

    A config of AutoGluon-RAG is translated. What is translated or ignored is logged as a warning of the logger
    `ragspec`.

    Args:
        source: Path of a YAML file, or a mapping such as `{"model": "demo", "speculation": {"method": "context"}}`. The
            mapping is not changed.
        overrides: Settings that win over those of `source`, each as "key.path=value", like `--set` on the command line.

    Returns:
        The config, frozen.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, or a value is not allowed. The message names the key.
    """
    import logging
    from copy import deepcopy

    from ragspec.config import load

    if isinstance(source, Mapping):
        config, notes = load.config_of(deepcopy(dict(source)), "config", overrides)
    else:
        config, notes = load.load_config(str(source), overrides)
    for note in notes:
        logging.getLogger(__name__).warning(note)
    return config


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), "register" if name == "register_drafter" else name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
