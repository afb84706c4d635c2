"""The model of a run in stock transformers, loaded as its runner loads it: the audit's outside view.

None of our code computes here: no cache rows, no packing, no drafts. Only the weights are shared with what it judges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ragspec.config.load import build_config
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError
from ragspec.records import Failure, Generation, Request

# vLLM arguments that make it compute something other than transformers does with the same checkpoint
OTHERWISE = ("hf_overrides", "kv_cache_dtype", "enable_lora", "sampling_args")


class Target:
    """The loaded target model of `config`. Raises ConfigError and ModelError where transformers cannot load it.

    ran: what a run said of itself (`Runner.about`): vLLM chooses its dtype as it starts.
    """

    def __init__(self, config: RunConfig, ran: dict[str, Any]) -> None:
        from ragspec.runners.huggingface.args import Args
        from ragspec.runners.huggingface.checkpoint import Checkpoint

        args = stock_config(config, ran).args()
        assert isinstance(args, Args)
        self._greedy = config.sampling.temperature == 0
        self._checkpoint = Checkpoint(config.model or "", args)
        self.model = self._checkpoint.load()
        self.tokenizer, self.rules = self._checkpoint.tokenizer, self._checkpoint.rules
        self.grammars = self._checkpoint.grammars

    def answers(self, requests: Sequence[Request]) -> Iterator[Generation | Failure]:
        """Yield what stock generate() answers, one record at a time."""
        from ragspec.runners.huggingface.assistance import Speculation
        from ragspec.runners.huggingface.stock import StockBackend

        backend = StockBackend(
            self.model,
            self.tokenizer,
            self._checkpoint.ends,
            Speculation("none"),
            rows=1,
            rules=self.rules,
            greedy_by_default=self._greedy,
            grammars=self.grammars,
        )
        return backend.generate(requests)


def stock_config(config: RunConfig, ran: dict[str, Any]) -> RunConfig:
    """Return `config` for stock generate() at batch 1. Raises ConfigError if that would be another model."""
    if config.model is None:
        raise ConfigError(f"runner {config.runner} has no model that transformers could load")
    given = config.runner_args
    if config.runner == "vllm":
        given = {key: given[key] for key in given if key in ("revision", "trust_remote_code")}
        given |= {"dtype": ran.get("dtype", "auto")}
    args = {key: value for key, value in given.items() if key not in ("lookahead", "engine", "batch_size")}
    raw = config.model_dump() | {
        "runner": "huggingface",
        "speculation": {"method": "none"},
        "runner_args": args | {"engine": "transformers", "batch_size": 1},
    }
    return build_config(raw, "stock generate()")


def check_same_answers(config: RunConfig, ran: dict[str, Any]) -> None:
    """Raise ConfigError if the runner and transformers rightly differ by more than rounding."""
    given = config.runner_args
    if config.runner != "vllm":
        return
    for key in OTHERWISE:
        if given.get(key) not in (None, "auto", False, {}):
            raise ConfigError(f"runner_args.{key} is vLLM's own: stock generate() would answer differently")
    if asked := ran.get("not_done"):
        raise ConfigError(f"the model's generation_config asks for {asked}, which vLLM does not support")
    if ran.get("quantized") or given.get("load_format") == "dummy":
        raise ConfigError("the weights that vLLM computes with are not the checkpoint's in transformers")
