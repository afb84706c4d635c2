import pytest

from ragspec.errors import ConfigError
from ragspec.inputs.feed import Feed, Pollable, Spread


class Partner:
    """A source that says when there is nothing there: a None in its script."""

    def __init__(self, *script):
        self.script = list(script)
        self.closed = False

    def __iter__(self):
        return self

    def __next__(self):
        while (item := self._next()) is None:
            pass
        return item

    def poll(self):
        return self._next()

    def _next(self):
        if not self.script:
            raise StopIteration
        item = self.script.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    def close(self):
        self.closed = True


def test_what_is_there_is_taken_and_no_more():
    feed = Feed(Partner(1, 2, None, 3, None))
    assert feed.take(9, wait=False) == [1, 2]
    assert feed.take(9, wait=False) == [3]
    assert not feed.over
    assert feed.take(9, wait=True) == []
    assert feed.over


def test_waiting_ends_with_the_first_item():
    assert Feed(Partner(None, None, 1, None, 2)).take(9, wait=True) == [1]


@pytest.mark.parametrize("wrap", [Feed, lambda feed: Spread(Feed(feed), lambda item: [item])])
def test_a_feed_of_a_feed_does_not_wait_either(wrap):
    inner = wrap(Partner(1, None, 2))
    assert isinstance(inner, Pollable)
    assert Feed(inner).take(9, wait=True) == [1]


@pytest.mark.parametrize("items", [[1, 2, 3], iter([1, 2, 3]), (n for n in (1, 2, 3))])
def test_plain_iterables_are_always_there(items):
    assert Feed(items).take(9, wait=False) == [1, 2, 3]


def test_items_put_back_come_next_and_in_their_order():
    feed = Feed([1, 2, 3, 4])
    feed.put_back(feed.take(3, wait=True))
    assert not feed.over
    assert list(feed) == [1, 2, 3, 4]


def test_no_more_than_the_limit_is_pulled():
    source = Partner(1, None, 2, 3)
    feed = Feed(source, 2)
    assert feed.take(9, wait=True) + feed.take(9, wait=True) == [1, 2]
    assert feed.over
    assert feed.take(9, wait=True) == []
    assert source.script == [3]


def test_what_came_before_a_break_is_handed_out_before_its_error():
    feed = Feed(Partner(1, 2, ConfigError("the disk is gone")))
    feed.put_back(feed.take(9, wait=True))
    assert feed.take(9, wait=True) == [1, 2]
    assert feed.over
    assert feed.take(9, wait=False) == []  # the caller has others to answer
    for _ in range(2):
        with pytest.raises(ConfigError, match="the disk is gone"):
            feed.take(9, wait=True)


def test_a_spread_looks_past_what_it_drops_but_does_not_wait_for_it():
    made = []

    def twice_if_even(item):
        made.append(item)
        return [item, item] if item % 2 == 0 else []

    spread = Spread(Feed(Partner(1, 3, None, 5, 6)), twice_if_even)
    assert spread.poll() is None
    assert made == [1, 3]  # what is dropped is dealt with at once
    assert next(spread) == 6
    assert spread.poll() == 6
    with pytest.raises(StopIteration):
        next(spread)


def test_closing_reaches_the_source():
    source = Partner(1)
    Feed(Spread(Feed(source), lambda item: [item])).close()
    assert source.closed
