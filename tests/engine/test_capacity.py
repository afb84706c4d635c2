"""How many rows at once, by what steps of so many take."""

import pytest
import torch

from ragspec.engine.kv.budget import FEWEST, MOST, MOST_CUDA, PAYS, most_rows

CPU = torch.device("cpu")


def asked(device, limit, seconds):
    """Return the number of rows that are chosen, and those that were timed."""
    timed = []

    def step(rows):
        timed.append(rows)
        return seconds(rows)

    return most_rows(device, limit, step), timed


def test_rows_are_added_while_they_add_speed():
    # tokens a second grow by 1.33 from 16 to 32 rows, and by 1.2 from 32 to 64
    rows, timed = asked(CPU, 1000, lambda rows: 16 + rows)
    assert (rows, timed) == (32, [16, 32, 64])


@pytest.mark.parametrize(("grow", "rows"), [(PAYS + 0.01, MOST), (PAYS - 0.01, FEWEST)])
def test_twice_the_rows_are_to_bring_a_quarter_more(grow, rows):
    assert asked(CPU, 1000, lambda rows: (2 / grow) ** (rows.bit_length() - 1))[0] == rows


def test_nothing_is_timed_beyond_what_there_are_records_for():
    assert asked(CPU, 10, lambda rows: 1.0) == (16, [])
    assert asked(CPU, 33, lambda rows: 1.0) == (64, [16, 32, 64])


def test_a_gpu_is_not_asked():
    assert asked(torch.device("cuda"), 1000, lambda rows: float(rows)) == (MOST_CUDA, [])
