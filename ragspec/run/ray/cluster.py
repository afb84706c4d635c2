"""A Ray cluster, joined or started for one run and left as it was found; and embedding on its workers.

with Cluster(ScaleConfig(workers=2)) as cluster:
    actor = cluster.start(Worker, cpus, gpus, config)
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from ragspec.config.sections import ScaleConfig
from ragspec.errors import ConfigError, ModelError, flat
from ragspec.host.machine import machine
from ragspec.retrieval.embedding import Embedder
from ragspec.run.ray.messages import WorkerLocation
from ragspec.run.ray.worker import probe

CONNECTING_S = 10.0
PROBING_S = 120.0  # for machines to report what they have
OBJECT_STORE = 200 << 20  # bytes, in a cluster that ragspec starts: only small messages pass through it
LOCAL, AUTO = "local", "auto"
REASON_CHARS = 300  # of Ray's error messages


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster. cpus, gpus: its total, used or not. key: Ray's node id."""

    key: str
    host: str
    cpus: float
    gpus: float


class Cluster:
    """One run's connection to Ray. Raises ConfigError if there is no cluster or none that fits."""

    def __init__(self, scale: ScaleConfig) -> None:
        self._scale = scale
        self._ray: Any = None
        self._joined = False  # Ray was already initialised in this process

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else Ray starts workers through uv
        try:
            import ray
        except ImportError:
            raise ConfigError('scale: needs Ray: pip install "ragspec[ray]"') from None
        self._ray = ray
        self._joined = ray.is_initialized()
        if not self._joined:
            _check_answers(self._scale.address)
            terminated = signal.getsignal(signal.SIGTERM)
            try:
                ray.init(**self._options())
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                ray.shutdown()
                raise ConfigError(f"scale.address: {self._scale.address}: {_reason(error)}") from None
            finally:
                # ray.init() replaces the SIGTERM handler
                if threading.current_thread() is threading.main_thread() and callable(terminated):
                    signal.signal(signal.SIGTERM, terminated)
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._joined:
            self._ray.shutdown()

    def _options(self) -> dict[str, Any]:
        scale = self._scale
        quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL, "include_dashboard": False}
        if scale.address != LOCAL:
            quiet.pop("include_dashboard")
            return {"address": scale.address, **quiet}
        cores = machine()["cores"] or 1
        wanted = scale.workers * (scale.cpus_per_worker or 1)
        return {
            "address": LOCAL,
            # without cpus_per_worker, more workers than cores is allowed: cores are then shared
            "num_cpus": cores if scale.cpus_per_worker else max(cores, wanted),
            "object_store_memory": OBJECT_STORE,
            **quiet,
        }

    def nodes(self) -> list[Node]:
        """Return the machines that are alive."""
        return [
            Node(
                each["NodeID"],
                each["NodeManagerHostname"],
                each["Resources"].get("CPU", 0.0),
                each["Resources"].get("GPU", 0.0),
            )
            for each in self._ray.nodes()
            if each["Alive"]
        ]

    def share(self, gpus_of_engine: int) -> tuple[float, float]:
        """Return the CPUs and GPUs of one worker: from the config, else derived from the machines.

        gpus_of_engine: GPUs that one engine takes, if there are any. Raises ConfigError if no machine has room.
        """
        nodes = self.nodes()
        most = max((node.gpus for node in nodes), default=0.0)
        gpus = self._scale.gpus_per_worker
        if gpus is None:
            gpus = float(gpus_of_engine) if most else 0.0
        able = [node for node in nodes if node.gpus >= gpus and node.cpus >= 1]
        cpus = self._scale.cpus_per_worker
        if cpus is None:
            if gpus:
                cpus = min((int(node.cpus * gpus / node.gpus) for node in able), default=1)
            else:
                each = -(-self._scale.workers // max(1, len(able)))
                cpus = min((int(node.cpus // each) for node in able), default=1)
            cpus = max(1, cpus)
        if not self.room(cpus, gpus):
            there = ", ".join(f"{node.host} has {amount(node.cpus, node.gpus)}" for node in nodes) or "no machine"
            asked = f"{self._scale.workers} workers of {amount(cpus, gpus)} each"
            raise ConfigError(
                f"scale: no machine of the cluster has room for a worker; requested: {asked}; available: {there}"
            )
        return float(cpus), gpus

    def room(self, cpus: float, gpus: float) -> int:
        """Return how many workers of that size fit on the machines."""
        return sum(
            int(min(node.cpus // cpus if cpus else 1e9, node.gpus // gpus if gpus else 1e9)) for node in self.nodes()
        )

    def start(self, kind: type, cpus: float, gpus: float, *args: Any) -> Any:
        """Return the handle of a new actor of class `kind`; it starts once a machine has room."""
        actor = self._ray.remote(kind)
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": 8,  # run, exchange and report, and their repeated calls
            "scheduling_strategy": "SPREAD",
        }
        return actor.options(**options).remote(*args)

    def probe_nodes(self, config: dict[str, Any], cpus: float, gpus: float) -> list[tuple[Node, WorkerLocation]]:
        """Return what each machine with room for such a worker reports; no weights are loaded."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        able = [node for node in self.nodes() if node.cpus >= cpus and node.gpus >= gpus]
        task = self._ray.remote(probe)
        said = [
            task.options(
                num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.key, soft=False)
            ).remote(config, os.getcwd())
            for node in able
        ]
        return list(zip(able, self._ray.get(said, timeout=PROBING_S), strict=True))

    def ready(self, refs: list[Any], timeout_s: float) -> list[Any]:
        """Return the refs that have a result; wait for the first one up to `timeout_s` seconds."""
        found, rest = self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        if rest and found:
            found += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return list(found)

    def get(self, ref: Any) -> Any:
        """Return a ref's result. Raises `death_errors()` if the actor is dead, and what its method raised."""
        return self._ray.get(ref)

    def kill(self, actor: Any) -> None:
        """End an actor at once."""
        self._ray.kill(actor, no_restart=True)

    def node_is_gone(self, node: str) -> bool:
        """Return whether a machine has left the cluster."""
        return any(each["NodeID"] == node and not each["Alive"] for each in self._ray.nodes())

    def unavailable_error(self) -> type[Exception]:
        """Return the error of a lost call or result; the actor may still be alive."""
        error: type[Exception] = self._ray.exceptions.ActorUnavailableError
        return error

    def failed_to_start(self, error: Exception) -> bool:
        """Return whether an actor's constructor failed, for instance because ragspec is not installed there."""
        return bool(getattr(error, "actor_init_failed", False))

    def reason(self, error: Exception) -> str:
        """Return the part of Ray's message that says why an actor died."""
        if self.failed_to_start(error):
            return str(error).strip().splitlines()[-1]  # of a traceback
        said = flat(error)
        for begin in ("Worker exit detail:", "The actor is dead because", "The actor died because of"):
            said = said.rpartition(begin)[2] or said
        return said.strip()[:REASON_CHARS]

    def death_errors(self) -> tuple[type[Exception], ...]:
        """Return the errors of a call whose actor is dead."""
        errors = self._ray.exceptions
        return (
            errors.RayActorError,
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.ObjectLostError,
            errors.OutOfMemoryError,  # Ray killed the actor because its machine was short of memory
        )


def _check_answers(address: str) -> None:
    """Raise ConfigError if nothing listens at an address; Ray itself would wait for minutes."""
    named = os.environ.get("RAY_ADDRESS", AUTO) if address == AUTO else address
    if named in (LOCAL, AUTO):
        return
    host, _, port = named.removeprefix("ray://").rpartition(":")
    try:
        if not host or not port.isdigit():
            raise OSError("an address is HOST:PORT")
        socket.create_connection((host, int(port)), CONNECTING_S).close()
    except OSError as error:
        raise ConfigError(
            f"scale.address: {address}: no Ray cluster answers there ({error.strerror or error})"
        ) from None


def amount(cpus: float, gpus: float) -> str:
    """Return the size of a machine or worker, for messages."""
    named = [f"{count:g} {unit}{'' if count == 1 else 's'}" for count, unit in ((cpus, "CPU"), (gpus, "GPU"))]
    return " and ".join(named if gpus else named[:1])


def _reason(error: Exception) -> str:
    said = flat(error, REASON_CHARS)
    if isinstance(error, ConnectionError | TimeoutError) or "Could not" in said or "failed to connect" in said.lower():
        return f"no Ray cluster answers there ({said})"
    return said


# -- embedding -------------------------------------------------------------------------------------


SLICE = 128  # passages per call
SLICE_TRIES = 3  # workers that may die on one slice


class EmbeddingWorker:
    """The actor: one loaded embedding model."""

    def __init__(self, name: str) -> None:
        self._embedder = Embedder(name)

    def documents(self, texts: list[str]) -> Any:
        """Return the vectors of passages."""
        return self._embedder.documents(texts)


class SharedEmbedder(Embedder):
    """An Embedder whose passages are embedded by workers; queries are embedded in this process."""

    def __init__(self, name: str, cluster: Cluster, workers: int, share: tuple[float, float]) -> None:
        super().__init__(name)
        self._name = name
        self._cluster = cluster
        self._share = share
        self._actors = [self._start_worker() for _ in range(workers)]

    def documents(self, texts: Sequence[str]) -> Any:
        """Return the vectors of passages: float32 array (len(texts), dimension). Raises ModelError."""
        import numpy

        slices = [list(texts[at : at + SLICE]) for at in range(0, len(texts), SLICE)]
        waiting, tries = list(reversed(range(len(slices)))), [0] * len(slices)
        free, calls = list(range(len(self._actors))), dict[Any, tuple[int, int]]()
        found: dict[int, Any] = {}
        while len(found) < len(slices):
            while free and waiting:
                worker, number = free.pop(), waiting.pop()
                calls[self._actors[worker].documents.remote(slices[number])] = worker, number
            for ref in self._cluster.ready(list(calls), 1.0):
                worker, number = calls.pop(ref)
                free.append(worker)
                try:
                    found[number] = self._cluster.get(ref)
                except self._cluster.death_errors() as error:
                    tries[number] += 1
                    if tries[number] == SLICE_TRIES:
                        why = self._cluster.reason(error)
                        raise ModelError(
                            f"{SLICE_TRIES} workers died while they embedded the same passages: {why}"
                        ) from None
                    waiting.append(number)
                    self._actors[worker] = self._start_worker()
        return numpy.concatenate([found[number] for number in range(len(slices))])

    def _start_worker(self) -> Any:
        return self._cluster.start(EmbeddingWorker, *self._share, self._name)


@contextmanager
def embedders(scale: ScaleConfig) -> Iterator[Any]:
    """Yield a function from a model's name to an Embedder that uses the cluster's workers."""
    with Cluster(scale) as cluster:
        share = cluster.share(1)
        yield lambda name: SharedEmbedder(name, cluster, scale.workers, share)
