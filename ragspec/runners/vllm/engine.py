"""vLLM's LLMEngine, in this process or in one of its own, which is started again if it dies.

    engine = Engine(engine_args, own_process=True, additions=None)
    engine.add("0", prompt, params); outputs = engine.step()

In its own process the engine never waits for what is done here: prompts are tokenised and lines written beside it.
Source: vLLM 0.32, v1/engine/llm_engine.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from multiprocessing.connection import wait
from typing import Any

from ragspec.host.collection import collect_all
from ragspec.host.waiting import Waiting
from ragspec.runners.vllm.config import Additions
from ragspec.runners.vllm.patches.engine_process import exit_code, own_process

RESET_TRIES, RESET_S = 200, 0.01  # to empty the prefix cache, while the last run's steps end


class EngineDied(Exception):
    """The engine's process ended. str() says how."""


class Engine:
    """A running engine.

    Args:
        arguments: Of vLLM's EngineArgs.
        own_process: Whether it gets a process of its own.
        additions: What is added to it, in its process; None for nothing.
    """

    def __init__(self, arguments: Mapping[str, Any], *, own_process: bool, additions: Additions | None) -> None:
        self._arguments = dict(arguments)
        self.own_process = own_process
        self._additions = additions
        self._waiting: AbstractContextManager[None] = nullcontext()  # how threads of a CPU's engine wait here
        self._inside: Any = None  # of an engine in this process
        self._first_at: dict[str, float] = {}  # when a request's first token came, by vLLM's id
        self._ids: dict[str, str] = {}  # our name -> vLLM's id
        self.inner: Any = None  # vLLM's LLMEngine
        self._start()

    def _start(self) -> None:
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        with redirect_stdout(sys.stderr), own_process(self._additions) if self.own_process else nullcontext():
            self.inner = LLMEngine.from_engine_args(
                EngineArgs(**self._arguments),
                usage_context=UsageContext.LLM_CLASS,  # batches as large as the LLM class has them
                enable_multiprocessing=self.own_process,
            )
        core = self.inner.engine_core
        self.own_process = hasattr(core, "outputs_queue")  # also by VLLM_ENABLE_V1_MULTIPROCESSING
        computes_here = current_platform.is_cpu() and not self.own_process
        self._waiting = Waiting() if computes_here else nullcontext()
        if not self.own_process and self._additions is not None:
            from ragspec.runners.vllm.inside import Inside

            self._inside = Inside(core.engine_core, self._additions)
        core.get_output = self._noting_first_tokens(core.get_output)

    def _noting_first_tokens(self, get_output: Callable[[], Any]) -> Callable[[], Any]:
        """Return `get_output` with a note of each first token's time, which vLLM's metrics cost more for."""

        def get() -> Any:
            outputs, now = get_output(), time.perf_counter()
            for each in outputs.outputs:
                if each.prefill_stats is not None:
                    self._first_at.setdefault(each.request_id, now)
            return outputs

        return get

    def restart(self) -> None:
        """Start the engine anew; its requests are lost."""
        self.close()
        self._start()

    def replace(self, arguments: Mapping[str, Any], *, own_process: bool, additions: Additions | None) -> None:
        """Start another engine in this one's place; its requests are lost. Arguments as for a new one."""
        self.close()
        self._arguments, self.own_process, self._additions = dict(arguments), own_process, additions
        self._start()

    def close(self) -> None:
        """End the engine, and free what it had in this process before another can start."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._inside, engine, self.inner = None, self.inner, None
        with redirect_stdout(sys.stderr):
            if engine is not None:
                engine.engine_core.shutdown()
                del engine
            collect_all()  # its parts refer to each other
            cleanup_dist_env_and_memory()

    def reset(self) -> bool:
        """Empty the prefix cache and forget measurements, so that each pass starts cold. Raises EngineDied.

        Returns whether the prefix cache is empty.
        """
        self.ask("reset")
        self._first_at.clear()
        self._ids.clear()
        tries = RESET_TRIES if self.own_process else 1
        while not (is_empty := bool(self._alive(self.inner.reset_prefix_cache))) and (tries := tries - 1):
            time.sleep(RESET_S)
        return is_empty

    def ask(self, what: str, *arguments: Any) -> Any:
        """Return what a method of the engine's Inside returns, None if it has none. Raises EngineDied."""
        if self._additions is None:
            return None
        if self._inside is not None:
            return getattr(self._inside, what)(*arguments)
        return self._alive(self.inner.engine_core.call_utility, f"ragspec_{what}", *arguments)

    def peak_memory(self) -> tuple[int, int]:
        """Return the peak bytes of the engine's own process: resident, and on GPUs. Raises EngineDied."""
        if not self.own_process:
            return 0, 0
        resident, on_gpus = self._alive(self.inner.engine_core.call_utility, "ragspec_peak_memory")
        return resident, on_gpus

    def add(self, name: str, prompt: Mapping[str, Any], params: Any) -> None:
        """Submit a request. Raises EngineDied, and what vLLM refuses it with."""
        self._ids[name] = self._alive(self.inner.add_request, name, prompt, params)

    def abort(self, names: list[str]) -> None:
        """Drop requests."""
        self._alive(self.inner.abort_request, names)

    def ended(self, name: str) -> dict[str, Any]:
        """Return what the engine's Inside knows of a request that was aborted; nothing if the engine has died."""
        with suppress(EngineDied):  # the next step says so
            return self.ask("ended", self._ids.get(name, "")) or {}
        return {}

    def is_computing(self) -> bool:
        """Return whether an engine of another process has brought nothing yet, so that step() would wait."""
        return self.own_process and bool(self.inner.engine_core.outputs_queue.empty())

    def has_ended(self, patience_s: float) -> bool:
        """Return whether an engine of another process ends within so many seconds."""
        if not self.own_process:
            return False
        return bool(
            wait([each.sentinel for each in self.inner.engine_core.resources.engine_manager.processes], patience_s)
        )

    def step(self) -> list[Any]:
        """Return the outputs of a step, which an engine of this process computes here. Raises EngineDied."""
        with self._waiting:
            outputs: list[Any] = self._alive(self.inner.step)
        return outputs

    def first_token_at(self, name: str) -> float | None:
        """Return when a finished request's first token came (perf_counter), and forget the request."""
        return self._first_at.pop(self._ids.pop(name, ""), None)

    def _alive(self, call: Callable[..., Any], *arguments: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return call(*arguments)
        except EngineDeadError as error:
            code = exit_code(self.inner.engine_core)
            how = "" if code is None else f" (signal {-code})" if code < 0 else f" (exit code {code})"
            raise EngineDied(f"the process of vLLM's engine ended{how}") from error
