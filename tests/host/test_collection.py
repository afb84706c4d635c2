"""The collector waits, and runs again afterwards."""

import gc

import pytest

from ragspec.host.collection import collection_paused


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
