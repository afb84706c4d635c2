"""How OpenMP's threads wait, by what else runs."""

import subprocess
import sys
import threading

import pytest
import torch

from ragspec.host import waiting
from ragspec.host.waiting import OtherProcesses, Waiting


@pytest.fixture(autouse=True)
def two_cores_for_two_threads(monkeypatch):
    monkeypatch.setattr(waiting, "INTERVAL_S", 0.0)
    monkeypatch.setattr(waiting.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def pools():
    return [thread for thread in threading.enumerate() if thread.name == "ragspec-waiting"]


def step(how):
    with how:
        pass
    for thread in [] if how.brief else pools():
        thread.join(10)


def test_threads_sleep_while_others_use_their_cores_and_spin_again_afterwards():
    used = 0.0
    how = Waiting(lambda: used)
    step(how)
    assert (how.brief, len(pools())) == (False, 0)
    used = 0.9
    step(how)
    step(how)
    assert (how.brief, len(pools())) == (True, 1)
    used = 0.1
    step(how)
    assert (how.brief, len(pools())) == (False, 0)


def test_pools_end_with_what_waits():
    how = Waiting(lambda: 2.0)
    step(how)
    (pool,) = pools()
    del how
    pool.join(10)
    assert not pools()


def test_a_machine_with_cores_to_spare_is_left_alone(monkeypatch):
    monkeypatch.setattr(waiting.os, "sched_getaffinity", lambda _: set(range(8)))
    how = Waiting(lambda: 5.0)
    step(how)
    assert not how.brief
    how = Waiting(lambda: 6.5)
    step(how)
    assert (how.brief, len(pools())) == (True, 7)  # 2 threads, and one more for each of 7 pools: 9 for 8 cores


def test_one_thread_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    how = Waiting(lambda: 2.0)
    step(how)
    assert not how.brief


def test_a_system_that_does_not_say_changes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(waiting, "STAT", tmp_path / "none")
    how = Waiting()
    step(how)
    assert not how.brief


def test_work_of_other_cores_and_of_guests_counts_once(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu 9 9 9 9\ncpu0 100 0 0 900 50 0 0 0 77 0\ncpu1 0 100 0 900 0 0 0 100 0 0\ncpu2 9 9 9 9\nintr 1\n"
    )
    assert waiting.busy_s(stat.read_text()) == 300 / waiting.os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not waiting.STAT.exists(), reason="the system does not say what its cores do")
def test_another_process_is_seen():
    others = OtherProcesses()
    assert others.used() is None
    code = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert others.used() > 0
