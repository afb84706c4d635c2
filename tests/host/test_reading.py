"""How far mapped files have been read, here and in processes that this one started."""

import mmap
import subprocess
import sys

import pytest

from ragspec.host.reading import Reading

PAGE = mmap.PAGESIZE
SIZE = 64 << 20  # the system maps up to two MiB around what is touched
MAPPED = "import mmap, sys; f = open(sys.argv[1], 'rb'); "
MAPPED += "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); "

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(SIZE))
    return path


def touch(mapped, share):
    for at in range(0, int(len(mapped) * share), PAGE):
        mapped[at]


def test_what_is_touched_of_a_mapped_file_has_been_read(file, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(bytes(SIZE))
    reading = Reading([file, other])
    assert (reading.done, reading.total) == (0, 2 * SIZE)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)  # so that the system maps no more than what is touched
        assert reading.done == 0
        touch(mapped, 0.25)
        assert 0.25 * SIZE <= reading.done < 0.4 * SIZE
        touch(mapped, 1)
        assert reading.done == SIZE
    assert reading.done == SIZE


def test_a_file_that_is_closed_again_has_been_read_unless_only_its_header_was(file):
    for share, done in ((0.01, 0), (0.5, SIZE)):
        reading = Reading([file])
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            mapped.madvise(mmap.MADV_RANDOM)
            touch(mapped, share)
            assert 0 < reading.done < SIZE
        assert reading.done == (done or pytest.approx(0, abs=0.05 * SIZE))


def test_a_process_that_this_one_started_counts(file):
    reading = Reading([file])
    script = f"{MAPPED}[m[at] for at in range(0, len(m), {PAGE})]; print('read', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        assert reading.done == SIZE
        child.stdin.close()
