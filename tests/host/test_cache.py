"""What is cached is read whole, whichever processes write it."""

import multiprocessing

from ragspec.host.cache import JsonCache

WRITES = 40


def write_again_and_again(size):
    for _ in range(WRITES):
        JsonCache("tried").write([size] * size, "one value")


def test_processes_that_write_one_value_at_once_leave_whole_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path))
    cache = JsonCache("tried")
    write_again_and_again(1)
    writers = [
        multiprocessing.get_context("fork").Process(target=write_again_and_again, args=(n,)) for n in (9, 90_000)
    ]
    for writer in writers:
        writer.start()
    found = []
    while any(writer.is_alive() for writer in writers):
        found.append(cache.read("one value"))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert all(value is not None and len(value) == value[0] for value in found)
    assert [path.name for path in (tmp_path / "tried").iterdir()] == [path.name for path in cache.files()]


def test_another_value_is_found_by_what_it_depends_on(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path))
    cache = JsonCache("tried")
    cache.write({"a": 1}, "model", 8)
    assert (cache.read("model", 8), cache.read("model", 9)) == ({"a": 1}, None)
    (path,) = cache.files()
    path.write_text("{")
    assert cache.read("model", 8) is None
