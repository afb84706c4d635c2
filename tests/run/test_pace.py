"""What a run says of its progress, from what it had done at given times."""

import pytest

from ragspec.run.pace import Pace, clock
from ragspec.stats import RunSummary, WorkerSummary


def at(records=0, failed=0, tokens=0, **more):
    return RunSummary(records=records, failed=failed, output_tokens=tokens, **more)


def test_a_line_has_the_records_the_speed_the_time_left_and_the_failures():
    pace = Pace()
    pace.progress(at(load_s=3.0), 5000, now=10.0)
    pace.progress(at(237, 0, 600, load_s=3.0, generate_s=10.0), 5000, now=20.0)
    found = pace.progress(at(1237, 3, 9900, load_s=3.0, generate_s=40.0), 5000, now=50.0)
    assert found.text() == "1,240/5,000, 248 tokens/s, 2:01 left, 3 failed"
    assert found.to_json()["left_s"] == pytest.approx(3760 / 31, abs=0.1)


def test_records_of_earlier_runs_are_finished_but_say_nothing_of_the_speed():
    pace = Pace()
    pace.progress(at(0, skipped=400, load_s=1.0), 500, now=0.0)
    found = pace.progress(at(10, tokens=100, skipped=400, load_s=1.0, generate_s=10.0), 500, now=10.0)
    assert found.text() == "410/500, 10 tokens/s, 1:30 left"


def test_the_speed_is_that_of_the_last_minutes():
    pace = Pace()
    for minute in range(11):
        found = pace.progress(at(minute, tokens=6000 * min(minute, 5), load_s=1.0), None, now=60.0 * minute)
    assert found.text() == "10 records, 0 tokens/s"


def test_the_speed_is_never_that_of_less_than_the_last_two_minutes():
    pace = Pace()
    for now, tokens in ((0.0, 0), (100.0, 1000), (200.0, 1000)):
        found = pace.progress(at(1, tokens=tokens, load_s=1.0), None, now=now)
    assert found.tokens_per_s == 5.0


def test_the_speed_leaves_out_loading_and_warming_up():
    pace = Pace()
    pace.progress(at(), 60, now=0.0)
    pace.progress(at(), 60, now=30.0)
    pace.progress(at(load_s=35.0), 60, now=50.0)
    found = pace.progress(at(2, tokens=40, load_s=35.0, generate_s=2.0), 60, now=54.0)
    assert found.text() == "2/60, 20 tokens/s, 0:58 left"
    other = Pace()
    other.progress(at(), 60, now=0.0)
    assert other.progress(at(2, tokens=40, load_s=35.0), 60, now=54.0).left_s is None  # since when is not known
    assert other.progress(at(32, tokens=640, load_s=35.0), 60, now=84.0).text() == "32/60, 20 tokens/s, 0:28 left"


def test_a_run_that_stands_still_says_so_instead_of_guessing():
    pace = Pace()
    pace.progress(at(load_s=1.0), 100, now=0.0)
    pace.progress(at(10, tokens=10, load_s=1.0), 100, now=10.0)
    assert "none finished" not in pace.progress(at(10, tokens=10, load_s=1.0), 100, now=60.0).text()
    found = pace.progress(at(10, tokens=10, load_s=1.0), 100, now=130.0)
    assert found.text() == "10/100, 0 tokens/s, none finished for 2:00"


def test_slow_records_and_a_run_that_is_done_do_not_stand_still():
    pace = Pace()
    pace.progress(at(load_s=1.0), 100, now=0.0)
    for done in (1, 2, 3):
        pace.progress(at(done, tokens=10, load_s=1.0), 100, now=30.0 * done)
    assert "none finished" not in pace.progress(at(3, tokens=10, load_s=1.0), 100, now=170.0).text()
    assert "none finished" in pace.progress(at(3, tokens=10, load_s=1.0), 100, now=300.0).text()
    assert "none finished" not in pace.progress(at(3, tokens=10, load_s=1.0), 3, now=300.0).text()


def test_at_its_end_a_run_has_the_speed_of_the_whole():
    pace = Pace()
    for now, done in ((0.0, 0), (10.0, 1), (500.0, 2)):
        pace.progress(at(done, tokens=100 * done, load_s=1.0), 4, now=now)
    found = pace.overall(at(2, tokens=200, generate_s=500.0), 4, now=500.0)
    assert found.text() == "2/4, 0 tokens/s"
    assert found.tokens_per_s == pytest.approx(0.4)


def test_before_the_first_record_a_run_says_what_it_does():
    pace = Pace(started=100.0)
    assert pace.progress(at(), 10, now=130.0).text() == "0/10, loading for 0:30"
    assert pace.progress(at(load_s=30.0), 10, now=131.0).text() == "0/10, warming up for 0:00"
    assert pace.progress(at(load_s=30.0), 10, now=140.0).text() == "0/10, warming up for 0:09"


def test_dead_workers_are_counted():
    workers = [WorkerSummary(name="0", alive=True), WorkerSummary(name="1")]
    pace = Pace()
    assert "1 of 2 workers" in pace.progress(at(1, load_s=1.0, workers=workers), 9, now=1.0).text()


def test_what_is_unknown_is_absent():
    assert {"total", "left_s", "tokens_per_s", "workers"}.isdisjoint(Pace().progress(at(), None, now=0.0).to_json())


def test_times_are_read_as_on_a_clock():
    assert [clock(seconds) for seconds in (0, 59.6, 112, 11050)] == ["0:00", "1:00", "1:52", "3:04:10"]
