"""RunConfig, the config of one run, and its JSON schema for editors."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

from ragspec import runners
from ragspec.config.io import Input, Output, OutputConfig
from ragspec.config.redaction import Address, Redactor, Settings, as_given
from ragspec.config.sections import (
    PromptConfig,
    RetrievalConfig,
    SamplingConfig,
    ScaleConfig,
    Section,
    SpeculationConfig,
    validate,
)
from ragspec.config.structured import StructuredConfig
from ragspec.records import Sampling
from ragspec.runners.base import RunnerArgs
from ragspec.speculation.methods import AUTO, HF, VLLM, method_named, methods_of

CHOICES = (HF, VLLM)  # the runners that `auto` chooses from
SAME_ARGS = {"batch_size", "lookahead", "revision", "trust_remote_code"}  # same meaning for both runners
LATER = {  # keys that older outputs lack
    "speculation": ("draft_model_args",),
    "sampling": (
        *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "n"),
        *("min_new_tokens", "ignore_eos", "stop_token_ids"),
    ),
    "prompt": (
        *("max_passages", "order", "keep_first", "show_ranks", "order_window"),
        *("chat_template_kwargs", "split_reasoning"),
    ),
}
SEARCH_KEYS = ("top_k", "mode", "candidates", "reranker_model", "order")


class RunConfig(Section):
    """One run: a model, a runner, records in, answers out."""

    model: Address | None = None
    """Hub id, folder, `.gguf` file (converted once into the user's cache), or `demo`."""
    runner: str = AUTO
    """`huggingface`, `vllm`, `fake` (no model: repeats the end of each prompt), or `auto`: vLLM if it is installed,
    supports the model, and should finish first, loading included; otherwise `huggingface`. With `auto`, `runner_args`
    are those of `huggingface`, unless only vLLM has the method. vLLM is ruled out if they contain anything but
    `batch_size`, `lookahead`, `revision` and `trust_remote_code`, or if the input comes from stdin."""
    input: Input | None = None
    """Where records come from."""
    output: Output = OutputConfig()
    """Where answers go."""
    order: Literal["input", "finish"] = "input"
    """Order of the output lines: `input` (an answer that finishes early waits in `NAME.pending.jsonl`), or `finish`."""
    prompt: PromptConfig = PromptConfig()
    sampling: SamplingConfig = SamplingConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    structured: StructuredConfig | None = None
    retrieval: RetrievalConfig | None = None
    runner_args: Settings = {}
    scale: ScaleConfig | None = None

    def args(self) -> RunnerArgs:
        """Return `runner_args` as the runner's model; for `auto`, of the first candidate. Raises ConfigError."""
        model = runners.module(self.runners()[0]).Args
        return cast(RunnerArgs, validate(model, self.runner_args, "config", "runner_args"))

    def runners(self) -> list[str]:
        """Return the runner, or the candidates of `auto` that support the method and `runner_args`.

        Raises ConfigError for an unknown method.
        """
        if self.runner != AUTO:
            return [self.runner]
        able = [word for word in CHOICES if word in method_named(self.speculation.method).runners]
        if HF in able and not self.runner_args.keys() <= SAME_ARGS:
            return [HF]
        return able

    def devices(self) -> int:
        """Return how many GPUs one engine uses."""
        sizes = [self.runner_args.get(key) for key in ("tensor_parallel_size", "pipeline_parallel_size")]
        return math.prod(size for size in sizes if isinstance(size, int))

    def workers(self) -> int | None:
        """Return the number of workers, None for a run in this process."""
        return self.scale.workers if self.scale else None

    def of_workers(self) -> RunConfig:
        """Return the config for workers of a cluster, which neither read the input nor write the output."""
        output = self.output.model_copy(update={"storage_options": {}})
        changed: dict[str, Any] = {"input": None, "output": output, "scale": None}
        if self.runner == VLLM and self.devices() > 1:
            # all GPUs of the engine belong to the worker; by default vLLM may request more from Ray
            changed["runner_args"] = {"distributed_executor_backend": "mp", **self.runner_args}
        return self.model_copy(update=changed)

    def as_given(self) -> dict[str, Any]:
        """Return the config as the user wrote it, with secrets in clear text: for another process, never for a file."""
        whole: dict[str, Any] = as_given(self.model_dump())
        return whole

    def redactor(self) -> Redactor:
        """Return a Redactor for this config's secrets."""
        return Redactor(self.model_dump())

    def identity(self) -> dict[str, Any]:
        """Return the part of the config that answers depend on; a resumed run must have the same."""
        whole = self.model_dump(mode="json", exclude={"input", "output", "order", "scale"})
        for name, keys in LATER.items():  # so that outputs begun before these keys existed can be resumed
            section = getattr(self, name)
            for key in keys:
                if getattr(section, key) == type(section).model_fields[key].default:
                    del whole[name][key]
        whole["sampling"]["max_new_tokens"] = self.sampling.longest
        del whole["sampling"]["default_new_tokens"]
        if self.structured is None:
            del whole["structured"]
        if self.input and self.input.columns.given:
            whole["columns"] = self.input.columns.given
        if self.output.format == "openai":  # two line formats do not mix
            whole["output_format"] = "openai"
        if self.retrieval:  # only the search matters here, not how the index was built
            whole["retrieval"] = {key: whole["retrieval"][key] for key in SEARCH_KEYS}
        if self.sampling.temperature == 0:  # sampling in a padded batch depends on the batch
            for key in self.args().neutral_keys():
                whole["runner_args"].pop(key, None)
        return whole


def to_sampling(config: SamplingConfig) -> Sampling:
    """Return the section as the plain value that travels with a request."""
    values = config.model_dump(exclude={"n", "default_new_tokens"})
    return Sampling(
        **values
        | {
            "max_new_tokens": config.longest,
            "stop": tuple(config.stop),
            "stop_token_ids": tuple(config.stop_token_ids),
            "logit_bias": tuple(sorted(config.logit_bias.items())),
        }
    )


# -- JSON schema -----------------------------------------------------------------------------------

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a config; `runner_args` and methods depend on the runner."""
    schema = RunConfig.model_json_schema()
    modules = {name: runners.module(name) for name in runners.names()}
    schema["properties"]["runner"]["enum"] = [AUTO, *modules]
    choices: list[dict[str, Any]] = []
    for name, module in modules.items():
        args = module.Args.model_json_schema(ref_template=f"#/$defs/{name}_{{model}}")
        for inner, definition in args.pop("$defs", {}).items():
            schema["$defs"][f"{name}_{inner}"] = definition
        methods = {"properties": {"method": {"enum": list(methods_of(name))}}}
        condition: dict[str, Any] = {"properties": {"runner": {"const": name}}}
        condition["required"] = ["runner"]
        choices.append({"if": condition, "then": {"properties": {"runner_args": args, "speculation": methods}}})
        if name == HF:
            may = {"runner": {"const": AUTO}, "speculation": methods}
            choices.append({"if": {"properties": may}, "then": {"properties": {"runner_args": args}}})
    return {"$schema": DRAFT, **schema, "title": "ragspec config", "allOf": choices}
