"""The collector waits, or leaves out what stays; afterwards it is as before."""

import gc
import weakref
from contextlib import suppress

import pytest

from ragspec.host.collection import collect_all, collection_paused, frozen_heap


@pytest.fixture(autouse=True)
def running():
    gc.enable()
    yield
    gc.enable()


def test_the_collector_waits_and_runs_again_after_an_error_too():
    def fail():
        assert not gc.isenabled()
        raise KeyError

    with pytest.raises(KeyError):
        collection_paused()(fail)()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with collection_paused():
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert not gc.isenabled()


class Cycle:
    def __init__(self):
        self.itself = self


def test_old_objects_are_exempt_meanwhile_and_new_ones_are_not():
    old = weakref.ref(Cycle())
    with suppress(KeyError), frozen_heap():
        new = weakref.ref(Cycle())
        gc.collect()
        assert old() is not None
        assert new() is None
        with frozen_heap():
            pass
        gc.collect()
        assert old() is not None, "what ends inside another does not end that"
        raise KeyError
    gc.collect()
    assert old() is None
    assert gc.get_freeze_count() == 0


def test_all_objects_are_collected_on_request():
    old = weakref.ref(Cycle())
    with frozen_heap():
        collect_all()
        assert old() is None
