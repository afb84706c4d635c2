"""vLLM. Being built: the config is read and checked; running needs the engine loop."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from ragspec.config import RunConfig
from ragspec.errors import ConfigError
from ragspec.runners.base import RunnerArgs

METHODS = (
    "none",
    "prompt_lookup",
    "draft_model",
    "suffix",
    "eagle",
    "eagle3",
    "medusa",
    "mtp",
    "dflash",
)


class Args(RunnerArgs):
    """`runner_args` of the vLLM runner: any argument of `LLM(...)`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    sampling_args: dict[str, Any] = {}  # to SamplingParams, beside the `sampling` section


class Runner:
    """Not yet there."""

    def __init__(self, config: RunConfig) -> None:
        raise ConfigError('runner: "vllm" is not in this version yet; use huggingface')
