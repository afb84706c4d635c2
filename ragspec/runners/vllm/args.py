"""`runner_args` of the vLLM runner."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from ragspec.config.redaction import Settings
from ragspec.runners.base import RunnerArgs

# of SamplingParams: what seeds, the number of answers, their texts and logprobs depend on outside vLLM, too
OF_SAMPLING = ("temperature", "seed", "n", "stop", "logprobs")

# of SamplingParams: what shapes the outputs that ragspec makes itself from tokens, and the only value it works with
OF_OUTPUTS = {
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "flat_logprobs": False,
    "prompt_logprobs": None,
    "output_kind": None,
}


class Args(RunnerArgs):
    """`runner_args` of the vLLM runner: any argument of `LLM(...)`, and these."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, use_attribute_docstrings=True)

    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Maximum number of records per step: vLLM's `max_num_seqs`, under the name used by the other runners."""
    lookahead: Annotated[int, Field(ge=1)] = 4096
    """Records read ahead, to submit those that share a prefix together. 1 keeps the given order and vLLM's own block
    size."""
    guard: bool = True
    """Time vLLM's own drafts (draft model, head, suffix decoding) against plain steps, and pause them while they are
    slower; with `num_tokens`, only report it."""
    own_process: bool | Literal["auto"] = "auto"
    """Run vLLM's engine in its own process, separate from tokenising and writing. `auto`: if vLLM schedules
    asynchronously, which it does on a GPU except with `context`, suffix decoding and, before 0.33, prompt lookup."""
    sampling_args: Settings = {}
    """Passed to `SamplingParams`, in addition to the `sampling` section; `temperature`, `seed`, `n`, `stop` and
    `logprobs` belong in that section."""

    @field_validator("sampling_args")
    @classmethod
    def _leaves_sampling_alone(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in OF_SAMPLING:
            if key in value:
                raise ValueError(f"{key} belongs in the sampling section: sampling.{key}")
        for key, only in OF_OUTPUTS.items():
            if value.get(key, only) != only:
                raise ValueError(f"{key}: ragspec makes its outputs from tokens itself; remove it")
        return value

    def neutral_keys(self) -> set[str]:
        memory = {"gpu_memory_utilization", "kv_cache_memory_bytes", "block_size"}
        return {"batch_size", "max_num_seqs", "lookahead", "guard", "enforce_eager", "own_process"} | memory
