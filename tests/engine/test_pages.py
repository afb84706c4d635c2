"""Memory that costs nothing until it is written."""

import mmap
from pathlib import Path

import pytest
import torch

from ragspec.engine.kv.cache import RaggedCache, zeros

STATUS = Path("/proc/self/statm")
PAGE = mmap.PAGESIZE
like = torch.empty(0)


def resident():
    """Return the bytes of this process that are in memory."""
    return int(STATUS.read_text().split()[1]) * PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_zero_of_the_shape_and_type_asked_for_and_can_be_written(dtype):
    found = zeros(torch.empty(0, dtype=dtype), (3, 5, 7))
    assert found.shape == (3, 5, 7)
    assert found.dtype == dtype
    assert not found.any()
    found += 1
    assert found.sum() == 105


def test_nothing_is_asked_of_the_system_for_nothing():
    assert zeros(like, (2, 0, 64)).shape == (2, 0, 64)


def test_more_than_there_can_be_is_a_memory_error_that_says_how_much():
    with pytest.raises(MemoryError, match=r"no room for 4,503,599,627,370,496 bytes"):
        zeros(like, (1 << 50,))


@pytest.mark.skipif(not STATUS.exists(), reason="Linux says what is in memory in /proc")
def test_a_row_brings_no_more_into_memory_than_it_writes():
    rows, slots, size = 16, 8192, 64
    before = resident()
    store = zeros(like, (1, rows, slots, size))
    store[:, :, :16] = 1.0
    used, room = resident() - before, store.numel() * 4
    assert rows * 16 * size * 4 <= used < room / 4


@pytest.mark.skipif(not STATUS.exists(), reason="Linux says what is in memory in /proc")
def test_a_cache_that_is_touched_is_in_memory_as_a_whole():
    cache = RaggedCache(4)
    cache.reserve(4096)
    layer = cache.layer_of(2, 64, like)
    before = resident()
    cache.touch()
    assert resident() - before >= 0.9 * 2 * layer.keys.numel() * 4
