"""A pool of workers, and passes that follow each other on it."""

from contextlib import contextmanager
from itertools import count

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError, ModelError
from ragspec.inputs.sources import MemorySource
from ragspec.outputs.base import MemorySink
from ragspec.outputs.journal import Journal
from ragspec.run.ray.driver import RayPass
from ragspec.run.ray.worker import Worker
from ragspec.run.ray.worker_pool import LostWorker, WorkerPool
from ragspec.run.session import prepare
from tests.run.ray.helpers import records
from tests.run.ray.threads import DeadActor, LostCall, ThreadCluster, fail, on_threads


@contextmanager
def pool_of(workers, **args):
    """Yield a session and its pool of loaded workers."""
    session = prepare(build_config({"runner": "fake", "runner_args": args, "scale": {"workers": workers}}))
    with WorkerPool(session, session.config.scale) as pool:
        pool.start_workers(None)
        yield session, pool
        pool.shut_down()


def run_pass(session, pool, number):
    """Return the ids of the lines of one pass."""
    sink = MemorySink()
    with Journal(sink) as journal:
        RayPass(session, pool, MemorySource(records(number)), journal).stream()
    return [line["id"] for line in sink.take()]


def test_passes_follow_each_other_and_none_starts_with_workers_that_still_wait(monkeypatch):
    on_threads(monkeypatch)
    with pool_of(2) as (session, pool):
        for _ in range(2):
            assert run_pass(session, pool, 20) == [f"q{i}" for i in range(20)]
            assert not any("exchange" in handle.refs for handle in pool.handles)


def test_workers_that_are_started_have_said_what_they_run(monkeypatch):
    on_threads(monkeypatch, report=0.2)
    with pool_of(1, batch_size=3) as (_, pool):
        assert pool.about["runner"]["batch_size"] == 3


def dying_once(monkeypatch, what):
    """Let the first call of a worker's method kill it; return what becomes a list of that worker."""
    do, dead = getattr(Worker, what), []

    def die_once(worker, *args):
        if not dead:
            dead.append(worker)
            raise DeadActor("killed")
        return do(worker, *args)

    monkeypatch.setattr(Worker, what, die_once)
    return dead


@pytest.mark.parametrize("what", ["run", "report"])
def test_a_worker_that_dies_while_it_loads_or_before_it_reports_is_loaded_again_before_a_benchmark(monkeypatch, what):
    on_threads(monkeypatch)
    dead = dying_once(monkeypatch, what)
    with pool_of(1) as (_, pool):
        assert [handle.state for handle in pool.handles] == ["answering"]
    assert dead


def test_no_record_waits_at_a_worker_that_is_gone(monkeypatch):
    on_threads(monkeypatch)
    monkeypatch.setattr("ragspec.run.ray.worker_pool.TRIES", 1)
    with pool_of(2) as (_, pool):
        first, second = pool.handles
        first.waiting = 5
        fail(first.refs["run"], DeadActor("killed"))
        while first.state == "answering":
            for event in pool.poll_events():
                if isinstance(event, LostWorker):
                    pool.replace(event.handle, event.why, made_progress=False)
        assert [(handle.state, handle.waiting) for handle in (first, second)] == [("gone", 0), ("answering", 0)]


def test_a_check_that_comes_again_does_not_replace_the_runner_that_reports(monkeypatch):
    on_threads(monkeypatch)
    sessions = []
    monkeypatch.setattr(
        "ragspec.run.ray.worker.prepare", lambda config: sessions.append(prepare(config)) or sessions[-1]
    )
    with pool_of(1) as (_, pool):
        worker = pool.handles[0].actor.worker
        worker.check()
        first, _ = sessions
        first.runner.notes.append("I answer")
        assert "I answer" in worker.report().notes


def late(monkeypatch, over, *numbers):
    """Let the workers that are checked first, second, ... not start until `over` is set."""
    check, calls = Worker.check, count(1)

    def slow(worker):
        if next(calls) in numbers:
            over.wait()
        return check(worker)

    monkeypatch.setattr(Worker, "check", slow)
    monkeypatch.setattr("ragspec.run.ray.worker_pool.GATHERING_S", 0.2)


def test_a_run_begins_without_a_worker_that_is_slow_to_start_and_takes_it_in_later(monkeypatch):
    over = on_threads(monkeypatch)
    late(monkeypatch, over, 2)
    session = prepare(build_config({"runner": "fake", "scale": {"workers": 2}}))
    with WorkerPool(session, session.config.scale) as pool:
        assert sorted(handle.state for handle in pool.handles) == ["checked", "placing"]
        assert len(run_pass(session, pool, 20)) == 20
        over.set()
        pool.start_workers(None)
        assert [handle.state for handle in pool.handles] == ["answering", "answering"]


@pytest.mark.parametrize(("slow", "message"), [((1, 2), "no worker has started"), ((2,), "a worker has not started")])
def test_workers_that_do_not_start_end_a_benchmark(monkeypatch, slow, message):
    late(monkeypatch, on_threads(monkeypatch), *slow)
    monkeypatch.setattr("ragspec.run.ray.worker_pool.PLACING_S", 0.5)
    with pytest.raises(ConfigError, match=message), pool_of(2):
        pass


def test_a_benchmark_does_not_begin_with_fewer_workers_than_it_is_of(monkeypatch):
    on_threads(monkeypatch)
    monkeypatch.setattr(ThreadCluster, "room", lambda *_: 1)
    with pytest.raises(ConfigError, match="room for 1 of 2 workers"), pool_of(2):
        pass


def test_a_benchmark_ends_if_one_of_its_workers_cannot_load(monkeypatch):
    on_threads(monkeypatch)
    run, first = Worker.run, []

    def die(worker, records):
        first.append(worker)
        if worker is not first[0]:
            raise DeadActor("killed")
        return run(worker, records)

    monkeypatch.setattr(Worker, "run", die)
    with pytest.raises(ModelError, match=r"worker \d died 3 times before it answered"), pool_of(2):
        pass


def test_a_worker_whose_checks_get_lost_ends_the_run(monkeypatch):
    on_threads(monkeypatch)
    monkeypatch.setattr("ragspec.run.ray.worker_pool.PLACING_S", 0.5)

    def lose(worker):
        if len(lost) < 50:  # else a pool that waits on would never end
            lost.append(worker)
            raise LostCall("lost")

    lost = []
    monkeypatch.setattr(Worker, "check", lose)
    with pytest.raises(ConfigError, match="no worker has started"), pool_of(1):
        pass


def test_an_error_of_workers_that_do_not_start_names_those_that_died(monkeypatch):
    late(monkeypatch, on_threads(monkeypatch), 2)
    monkeypatch.setattr("ragspec.run.ray.worker_pool.PLACING_S", 1)
    monkeypatch.setattr("ragspec.run.ray.worker_pool.TRIES", 1)

    def die(worker, records):
        raise DeadActor("killed")

    monkeypatch.setattr(Worker, "run", die)
    session = prepare(build_config({"runner": "fake", "scale": {"workers": 2}}))
    with (
        pytest.raises(ConfigError, match=r"worker \d died, and no other worker has started"),
        WorkerPool(session, session.config.scale) as pool,
    ):
        run_pass(session, pool, 20)
