"""Random damage to JSON-like values and to bytes, shared by lines and configs."""

from copy import deepcopy


def change_value(chance, value, values, keys, deeper=0.7):
    """Change one place inside of `value`, a dict or list, in place: drop, wrap, rename or replace it.

    values: what may come in its place. keys: names it may get. deeper: how likely a nested value is gone into.
    """
    place = value
    while names := list(place) if isinstance(place, dict) else list(range(len(place))):
        name = chance.choice(names)
        inner = place[name]
        if isinstance(inner, dict | list) and inner and chance.random() < deeper:
            place = inner
            continue
        change = chance.randrange(4)
        if change == 0:
            del place[name]
        elif change == 1:
            place[name] = [inner]
        elif change == 2 and isinstance(place, dict):
            place[chance.choice(keys)] = inner
        else:
            place[name] = deepcopy(chance.choice(values))
        return


def flip(chance, raw):
    """Return `raw` with one bit flipped."""
    at = chance.randrange(len(raw) or 1)
    return raw[:at] + bytes([raw[at] ^ 1 << chance.randrange(8)]) + raw[at + 1 :] if raw else raw


def cut(chance, raw):
    """Return a beginning of `raw`."""
    return raw[: chance.randrange(len(raw) + 1)]
