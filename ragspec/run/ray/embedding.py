"""Passages embedded on several workers: `embedders(scale)` makes what `retrieval.build` asks for vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ragspec.config.sections import ScaleConfig
from ragspec.errors import ModelError
from ragspec.retrieval.embedding import Embedder
from ragspec.run.ray.cluster import Cluster

SLICE = 128  # passages that travel together
TRIES = 3  # workers that may die of one slice


class EmbeddingWorker:
    """The actor: one loaded embedding model."""

    def __init__(self, name: str) -> None:
        self._embedder = Embedder(name)

    def documents(self, texts: list[str]) -> Any:
        """Return the vectors of passages."""
        return self._embedder.documents(texts)


class SharedEmbedder(Embedder):
    """An embedder whose passages are embedded by workers; what it says of itself, and questions, are its own."""

    def __init__(self, name: str, cluster: Cluster, workers: int, share: tuple[float, float]) -> None:
        super().__init__(name)
        self._name = name
        self._cluster = cluster
        self._share = share
        self._actors = [self._begin() for _ in range(workers)]

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
                except self._cluster.lost() as error:
                    tries[number] += 1
                    if tries[number] == TRIES:
                        why = self._cluster.reason(error)
                        raise ModelError(f"{TRIES} workers died while they embedded the same passages: {why}") from None
                    waiting.append(number)
                    self._actors[worker] = self._begin()
        return numpy.concatenate([found[number] for number in range(len(slices))])

    def _begin(self) -> Any:
        return self._cluster.start(EmbeddingWorker, *self._share, self._name)


@contextmanager
def embedders(scale: ScaleConfig) -> Iterator[Any]:
    """Yield what makes an Embedder of a model's name, whose passages are embedded by workers."""
    with Cluster(scale) as cluster:
        share = cluster.share(1)
        yield lambda name: SharedEmbedder(name, cluster, scale.workers, share)
