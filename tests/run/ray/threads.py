"""A cluster whose actors are objects of this process, and whose calls are threads: it starts fast and needs no Ray."""

import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from threading import Event, Thread
from types import SimpleNamespace

from ragspec import __version__
from ragspec.run.ray.messages import WorkerLocation, pack


class LostCall(Exception):
    """A call or its result got lost."""


class DeadActor(Exception):
    """The actor is dead."""


class ThreadActor:
    """An actor; `delays` says how many seconds late each method begins."""

    def __init__(self, worker, delays):
        self.worker = worker
        self.calls = []
        self._threads = []
        self._delays = delays

    def __getattr__(self, what):
        return SimpleNamespace(remote=partial(self._begin, what))

    def _begin(self, what, *args):
        call = Future()
        self.calls.append(call)
        self._threads.append(Thread(target=self._answer, args=(call, what, args), daemon=True))
        self._threads[-1].start()
        return call

    def end(self):
        """End its threads, a killed actor's too."""
        self.worker.exchange(sys.maxsize, pack([]), "run", 0, 0.0)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _answer(self, call, what, args):
        time.sleep(self._delays.get(what, 0))
        try:
            found = getattr(self.worker, what)(*args)
        except Exception as error:
            fail(call, error)
        else:
            if not call.done():
                call.set_result(found)


def fail(call, error):
    """Let a call fail, unless it is done."""
    if not call.done():
        call.set_exception(error)


class ThreadCluster:
    """In place of Cluster (cluster.py)."""

    def __init__(self, workers, delays, over):
        self.actors = []
        self._workers = workers
        self._delays = delays
        self._over = over

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._over.set()
        for actor in self.actors:
            actor.end()

    def share(self, gpus):
        return 1.0, 0.0

    def room(self, cpus, gpus):
        return self._workers

    def start(self, kind, cpus, gpus, *args):
        self.actors.append(ThreadActor(kind(*args), self._delays))
        return self.actors[-1]

    def ready(self, refs, timeout_s):
        return list(wait(refs, timeout_s, FIRST_COMPLETED).done)

    def get(self, ref):
        return ref.result()

    def kill(self, actor):
        for call in actor.calls:
            fail(call, DeadActor("killed"))

    def node_is_gone(self, node):
        return False

    def unavailable_error(self):
        return LostCall

    def death_errors(self):
        return (DeadActor,)

    def failed_to_start(self, error):
        return False

    def reason(self, error):
        return str(error)


def on_threads(monkeypatch, **delays):
    """Let worker pools use a ThreadCluster; return an event that is set when one ends."""
    over = Event()
    place = WorkerLocation("here", "node", "3", {"ragspec": __version__})
    monkeypatch.setattr("ragspec.run.ray.worker.here", lambda: place)
    monkeypatch.setattr("ragspec.run.ray.worker_pool.Cluster", lambda scale: ThreadCluster(scale.workers, delays, over))
    return over
