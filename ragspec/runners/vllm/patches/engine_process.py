"""vLLM's engine in a process of its own: ended with ours, deaf to a terminal's Ctrl-C, and missed when it dies.

    with own_process(additions):
        engine = LLMEngine.from_engine_args(args, enable_multiprocessing=True)

vLLM starts `EngineCoreProc.run_engine_core` in a new process. Ours stands in its place while that process is started:
it waits on a thread for the end of the process that started it, and moves the engine to a session of its own, so that
Ctrl-C reaches only the process that writes the answers. What the engine prints goes to stderr. Its process does not
import the user's main module again, which may have no `if __name__ == "__main__"`. If the engine is killed, vLLM's
synchronous client would wait for it for ever; `watch` wakes it.
Source: vLLM 0.32, v1/engine/utils.py, core_client.py. Limit: one engine process, not Ray's actors.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from threading import Thread
from types import ModuleType
from typing import Any

from ragspec.host.machine import peak_memory
from ragspec.runners.vllm.patches import Patch

PATCH = Patch(
    changes=(
        "vllm.v1.engine.core:EngineCoreProc.run_engine_core",
        "vllm.v1.engine.core:EngineCoreProc.__init__",
        "vllm.v1.engine.core_client:SyncMPClient.__init__",
    ),
    versions=("0.32", "0.33"),
    why="vLLM's engine outlives a process that is killed, and a process whose engine is killed waits for ever",
    upstream="https://github.com/vllm-project/vllm/issues/55510",
    until="vLLM's engine ends with its client, and its synchronous client notices that an engine is gone",
)
EXIT_TRIES, EXIT_S = 100, 0.01
_unpatched: Callable[..., None] | None = None  # vLLM's own, where this process was forked from one that had replaced it


@contextmanager
def own_process(additions: Any) -> Iterator[None]:
    """Start engine processes, within this context, as `run_engine_core` runs them.

    additions: arguments of Inside, which the process makes beside its engine; None for nothing.
    """
    from vllm.v1.engine.core import EngineCoreProc

    global _unpatched
    from vllm.v1.engine.core_client import SyncMPClient

    _unpatched, main = EngineCoreProc.run_engine_core, sys.modules["__main__"]
    EngineCoreProc.run_engine_core = staticmethod(partial(run_engine_core, additions))
    connect = _extend(SyncMPClient, watch)  # before anything can wait for it
    sys.modules["__main__"] = ModuleType("__main__")  # a spawned process would import the main module
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        SyncMPClient.__init__ = connect
        EngineCoreProc.run_engine_core, _unpatched = staticmethod(_unpatched), None


def run_engine_core(additions: Any, *arguments: Any, **named: Any) -> None:
    """Run vLLM's engine until it ends, or the process that started it does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    Thread(target=_end_after, args=[parent.sentinel], name="parent", daemon=True).start()
    with suppress(PermissionError):  # it leads a group already
        os.setsid()
    sys.stdout.flush()
    os.dup2(2, 1)  # stdout is for records
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCoreProc

    if current_platform.is_cpu():
        from ragspec.runners.vllm.patches.seeds import patch_seeds

        patch_seeds()
        _extend(EngineCoreProc, _wait_briefly)
    _extend(EngineCoreProc, _tell_peak)
    if additions is not None:
        _extend(EngineCoreProc, partial(_add, additions))
    (_unpatched or EngineCoreProc.run_engine_core)(*arguments, **named)


def _extend(kind: Any, change: Callable[[Any], None]) -> Any:
    """Let `change` see each object of this class once it is made; return the class's own `__init__`."""
    make = kind.__init__

    def made(core: Any, *arguments: Any, **named: Any) -> None:
        make(core, *arguments, **named)
        change(core)

    kind.__init__ = made
    return make


def _add(additions: Any, core: Any) -> None:
    """Make an engine's Inside, whose methods its client calls as the engine's own."""
    from ragspec.runners.vllm.inside import Inside

    inside = Inside(core, additions)
    for name in ("reset", "report", "progress", "ended"):
        setattr(core, f"ragspec_{name}", getattr(inside, name))


def _tell_peak(core: Any) -> None:
    """Let the client ask for the peak memory of this process and of its devices' own."""

    def peaks() -> tuple[int, int]:
        every = {os.getpid(): peak_memory()}
        every |= dict(core.model_executor.collective_rpc(_peak_of))
        return sum(resident for resident, _ in every.values()), sum(on_gpus for _, on_gpus in every.values())

    core.ragspec_peak_memory = peaks


def _peak_of(worker: Any) -> tuple[int, tuple[int, int]]:
    """Return the process that one of vLLM's workers is in, and its peak memory."""
    return os.getpid(), peak_memory()


def _wait_briefly(core: Any) -> None:
    """Let the threads of an engine on a CPU sleep at barriers while other processes use the cores."""
    from ragspec.host.waiting import Waiting

    step, waiting = core.step_fn, Waiting()

    def step_waiting() -> Any:
        with waiting:
            return step()

    core.step_fn = step_waiting


def _end_after(sentinel: int) -> None:
    """Kill this process once the other has ended. Its workers notice that, by vLLM's own pipes."""
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def watch(client: Any) -> None:
    """Wake vLLM's synchronous client once its engine's process has ended."""
    from vllm.v1.engine.exceptions import EngineDeadError

    processes = client.resources.engine_manager.processes
    sentinels, outputs, results = [each.sentinel for each in processes], client.outputs_queue, client.utility_results
    resources = client.resources

    def notice() -> None:
        wait(sentinels)
        resources.engine_dead = True  # first, so that no call can begin to wait
        outputs.put_nowait(EngineDeadError())
        for result in list(results.values()):
            with suppress(InvalidStateError):
                result.set_exception(EngineDeadError())

    Thread(target=notice, name="engine", daemon=True).start()


def exit_code(client: Any) -> int | None:
    """Return the exit code of the client's dead engine process, negative for a signal; None if it is not known."""
    (process,) = client.resources.engine_manager.processes
    for _ in range(EXIT_TRIES):  # a thread of vLLM's may be asking for it at this moment
        if process.exitcode is not None:
            break
        time.sleep(EXIT_S)
    code: int | None = process.exitcode
    return code
