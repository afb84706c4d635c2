"""The vLLM runner: records stream in, answers stream out, and one bad record stops nothing.

    runner: vllm
    runner_args: {max_model_len: 4096, gpu_memory_utilization: 0.9}     # any argument of LLM(...)

Limit: one engine; several GPUs by tensor_parallel_size.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from typing import Any, Self

from ragspec.config.redaction import revealed
from ragspec.config.run import RunConfig
from ragspec.errors import ModelError
from ragspec.models.resolve import context_length
from ragspec.records import Failure, Generation, Request, Sampling
from ragspec.runners.vllm.args import Args
from ragspec.runners.vllm.config import is_ours, one_line
from ragspec.runners.vllm.engine import Engine
from ragspec.runners.vllm.patches.seeds import patch_seeds
from ragspec.runners.vllm.plan import Plan
from ragspec.runners.vllm.stream import Stream
from ragspec.speculation.methods import PLAIN, VLLM, method_named

__all__ = ["Args", "Runner"]


class Runner:
    """Answers with one vLLM engine."""

    def __init__(self, config: RunConfig) -> None:
        self._plan = Plan(config)
        self._running: Engine | None = None
        self.method = self._plan.method
        self.remembers = not config.speculation.speculative_config and VLLM in method_named(self.method).remembers
        self.cites = is_ours(self.method)
        self._drafting: dict[str, Any] = {}  # statistics of the latest run's drafts
        self._notes: list[str] = []
        self._judgement: list[str] = []  # notes of the latest run
        self.prefill_s: float | None = None  # unknown: prefill and decoding share the engine's steps
        self.decode_s: float | None = None
        self.decode_tokens = 0

    def check(self) -> None:
        """Find the model, draft and tokenizers, and let vLLM validate its configuration. Raises ConfigError."""
        plan = self._plan
        plan.check()
        self._notes += plan.notes
        self.method, self.cites = plan.method, is_ours(plan.method) and plan.undraftable
        if is_ours(self.method) and not plan.undraftable:
            self._notes.append(f"method {self.method}: vLLM's devices have processes of their own; no passage is cited")
        self.tokenizer = plan.tokenizer
        self.context_length: int | None = plan.context_length

    @property
    def engine(self) -> Any:
        """vLLM's LLMEngine, while there is one."""
        return self._running.inner if self._running is not None else None

    @property
    def engine_args(self) -> dict[str, Any]:
        """What vLLM's engine is made with, once check() is done; secrets are veiled."""
        return self._plan.engine_args

    def __enter__(self) -> Self:
        plan = self._plan
        if plan.on_cpu and plan.is_tried() and not plan.own_process:
            patch_seeds()
        try:
            self._running = Engine(revealed(plan.engine_args), own_process=plan.own_process, additions=plan.additions)
        except Exception as error:  # anything may stop an engine from starting
            self._free()
            with_method = "" if self.method == PLAIN else f" with method {self.method}"
            raise ModelError(
                f'"{plan.model_name}": vLLM could not start{with_method}: {one_line(error)} '
                "(if memory is short: lower runner_args.max_model_len, or choose a smaller model)"
            ) from error
        return self

    def __exit__(self, *exc: object) -> None:
        self._free()

    def _free(self) -> None:
        engine, self._running = self._running, None
        if engine is not None:
            engine.close()
            del engine
        gc.collect()
        from vllm.distributed import cleanup_dist_env_and_memory

        with redirect_stdout(sys.stderr):
            cleanup_dist_env_and_memory()

    def warm_up(self, records: int | None = None) -> None:
        """Answer a short prompt, so that the first record does not pay for lazy initialisation."""
        ids = self.tokenizer.encode("one two three one two three one two", special_tokens=True)
        for _ in self._stream().run([Request(-1, "warm-up", ids, Sampling(max_new_tokens=8))]):
            pass

    def generate(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield outcomes as they finish, with a bounded number of requests in flight."""
        self._judgement = []
        stream = self._stream()
        yield from stream.run(requests)
        if stream.restarted:
            self._judgement.append(f"{stream.restarted}; it was started again, and answered what was left")
        if stream.masked_logprobs:
            self._judgement.append(
                "logprobs of structured answers are those under their grammar (-9999: not allowed there), not the "
                "model's own: vLLM masks before it tells them"
            )
        report = self._running.ask("report") if self._running is not None else None
        if report is not None:
            self._drafting = report["about"]
            self._judgement += report["notes"]

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the engine and on the latest run's drafts."""
        return self._notes + self._judgement

    def _stream(self) -> Stream:
        plan = self._plan
        assert self._running is not None
        return Stream(
            self._running,
            self.tokenizer,
            rows=plan.rows,
            lookahead=plan.args.lookahead,
            sampling_args=revealed(plan.args.sampling_args),
            lost=plan.lost,
            undraftable=plan.undraftable,
            method=self.method,
        )

    def outlook(self) -> str:
        """Return what will answer; call check() first."""
        place = "its CPU build" if self._plan.on_cpu else "on a GPU"
        return f"vLLM ({place}) will answer, with method {self.method} and up to {self._plan.rows} records at once"

    def watched(self, bytes_per_s: float, flops_per_s: float) -> None:
        """Return None: vLLM's steps cannot be profiled from here."""

    def about(self) -> dict[str, Any]:
        """Return the model, revision, batch size and the arguments passed to vLLM."""
        plan = self._plan
        return {
            "model": plan.source.path,
            "revision": getattr(plan.hf_config, "_commit_hash", None),
            "batch_size": plan.rows,
            "own_process": plan.own_process,
            "dtype": plan.dtype,
            "quantized": plan.quantized,
            **({"not_done": plan.not_done} if plan.not_done else {}),
            "context_length": plan.context_length or context_length(plan.hf_config),
            "engine_args": {key: value for key, value in plan.engine_args.items() if key != "model"},
            **self._drafting,
        }
