import pickle
import time
from threading import Event, Thread

import pytest

from ragspec.inputs.feed import Feed
from ragspec.json_text import loads
from ragspec.outputs.answers import FailedRecord
from ragspec.records import Passage, Record
from ragspec.run.answering import RecordResult, RecordTask
from ragspec.run.ray.messages import Mailbox, ResultBuffer, WorkerMessage, pack, unpack
from ragspec.run.ray.worker import Worker
from ragspec.stats import Cost, SpecStats


def asked(*indexes):
    return [RecordTask(index, "", index, Record(str(index))) for index in indexes]


def test_a_runner_takes_what_is_there_and_waits_only_when_it_has_nothing():
    inbox = Mailbox()
    feed = Feed(inbox)
    assert feed.take(3, wait=False) == []
    inbox.add(asked(1, 2, 3))
    assert [each.index for each in feed.take(2, wait=True)] == [1, 2]
    assert inbox.look() == (1, True)
    assert inbox.look() == (1, False)
    assert [each.index for each in feed.take(9, wait=False)] == [3]
    found = []
    reader = Thread(target=lambda: found.extend(feed.take(1, wait=True)))
    reader.start()
    time.sleep(0.05)
    assert not found
    inbox.add(asked(4))
    reader.join(10)
    assert [each.index for each in found] == [4]


def test_the_end_wakes_who_waits():
    inbox = Mailbox()
    left = []
    reader = Thread(target=lambda: left.append(list(inbox)))
    reader.start()
    inbox.add(asked(1))
    inbox.add([], "run")
    reader.join(10)
    assert [[each.index for each in found] for found in left] == [[1]]
    assert inbox.over
    inbox.add([], "run")
    with pytest.raises(StopIteration):
        inbox.poll()


def test_what_the_runner_has_not_taken_can_be_taken_back():
    inbox = Mailbox()
    inbox.add(asked(1, 2, 3))
    assert next(inbox).index == 1
    assert inbox.take_back(1) == [3]
    assert inbox.take_back(5) == [2]
    assert inbox.poll() is None


def test_lines_travel_together_and_nobody_waits_longer_than_told():
    outbox = ResultBuffer()
    assert outbox.take(0.05) == ([], [])  # with nobody there to write
    lines = [RecordResult(index, b"{}", 0, []) for index in range(3)]

    def write():
        for line in lines:
            outbox.put(line)

    writer = Thread(target=write)
    writer.start()
    found = []
    while len(found) < 3:
        found += outbox.take(10)[0]
    writer.join()
    assert found == lines
    outbox.close()
    assert outbox.take(60) == ([], [])  # at once


def test_a_message_that_comes_again_is_taken_in_once_and_answered_alike(tmp_path, monkeypatch):
    outbox = ResultBuffer()
    outbox.put(RecordResult(0, b"{}", 0, []))
    monkeypatch.setattr("ragspec.run.ray.worker.ResultBuffer", lambda: outbox)
    worker = Worker({"runner": "fake"}, str(tmp_path / "nowhere"))
    first = worker.exchange(1, pack(asked(1, 2)), None, 0, 0.0)
    assert worker.exchange(1, pack(asked(1, 2)), None, 0, 0.0) is first
    word = unpack(first)
    assert (word.waiting, len(word.lines)) == (2, 1)
    word = unpack(worker.exchange(2, pack(asked(3)), None, 1, 0.0))
    assert (word.waiting, word.lines, word.returned) == (2, [], [3])


def test_a_message_that_comes_after_a_later_one_takes_nothing(tmp_path, monkeypatch):
    outbox = ResultBuffer()
    monkeypatch.setattr("ragspec.run.ray.worker.ResultBuffer", lambda: outbox)
    worker = Worker({"runner": "fake"}, str(tmp_path / "nowhere"))
    worker.exchange(2, pack(asked(1)), "pass", 0, 0.0)
    outbox.put(RecordResult(0, b"{}", 0, []))
    worker.exchange(1, pack([]), None, 0, 0.0)
    word = unpack(worker.exchange(3, pack(asked(2)), None, 0, 0.0))
    assert (word.waiting, len(word.lines)) == (2, 1)


def test_passes_follow_each_other_and_none_sees_what_belongs_to_the_next():
    inbox = Mailbox()
    inbox.add(asked(1, 2), "pass")
    inbox.add(asked(3))
    assert inbox.look()[0] == 3
    assert [each.index for each in Feed(inbox)] == [1, 2]
    assert not inbox.over
    inbox.add([], "run")
    assert inbox.take_back(5) == []  # whoever is told that this was all has begun it
    assert [each.index for each in Feed(inbox)] == [3]
    assert inbox.over


def test_what_travels_arrives_as_it_was():
    passage = Passage("1", "words", title=None, score=0.5)
    record = Record(
        "q", messages=({"role": "user", "content": "?"},), contexts=(passage,), metadata={"a": [1, None, float("inf")]}
    )
    spec = SpecStats(steps=3, drafted=4, accepted=2)
    answered = RecordResult(7, b"{}", 5, [Cost(1, 2, spec, 0.1, None, "")])
    failed = FailedRecord("q", "key", "RecordError", "wrong", 3)
    for message in (
        [RecordTask(1, "key", 2, record, "query")],
        WorkerMessage([answered], [(1, failed)], 1, True, [2], "answering"),
    ):
        assert unpack(pack(message)) == message
    assert len(pack([RecordTask(1, "key", 2, record)])) < len(pickle.dumps([RecordTask(1, "key", 2, record)]))


def test_a_record_as_nested_as_json_may_be_travels():
    nested = loads(b"[" * 1000 + b"]" * 1000)
    (found,) = unpack(pack([RecordTask(1, "key", 2, Record("q", metadata={"a": nested}))]))
    depth, inner = 0, found.record.metadata["a"]
    while inner:
        depth, (inner,) = depth + 1, inner
    assert depth == 999


def test_a_repeated_run_raises_what_the_first_raised(tmp_path, monkeypatch):
    worker = Worker({"runner": "fake"}, str(tmp_path / "nowhere"))
    monkeypatch.setattr(worker, "_run", broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of luck"):
            worker.run(1)


def broken(records):
    raise RuntimeError("out of luck")


def test_repeated_runs_do_not_take_all_threads_of_the_actor(tmp_path, monkeypatch):
    worker, end = Worker({"runner": "fake"}, str(tmp_path / "nowhere")), Event()
    monkeypatch.setattr(worker, "_run", lambda records: end.wait(10) and None)
    calls = [Thread(target=worker.run, args=(1,)) for _ in range(9)]
    for call in calls:
        call.start()
        time.sleep(0.01)
    for call in calls[1:-1]:
        call.join(10)
    assert [call.is_alive() for call in calls] == [True, *[False] * 7, True]
    end.set()
    for call in calls:
        call.join(10)
        assert not call.is_alive()
