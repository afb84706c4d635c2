"""What takes long: `python -m tests.durations report.xml`, of what `pytest --junit-xml=report.xml` wrote.

With --fast the tests are those of `make test-fast`: what takes long there is named, as it is to be marked slow or made
quick, and what takes very long is refused.
"""

import sys
from collections import Counter
from xml.etree import ElementTree

SHOWN = 40
LONG_S, REFUSED_S = 2.0, 30.0  # of a fast test; the latter is more than a busy machine makes of a quick one


def durations(path):
    """Return the seconds of each test, by its name, the making of its fixtures included."""
    found = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        found[f"{case.get('classname')}::{case.get('name')}"] += float(case.get("time"))
    return found


def functions(found):
    """Return the seconds of each test function, its parameters together, and how many these are."""
    seconds, count = Counter(), Counter()
    for name, taken in found.items():
        seconds[name.partition("[")[0]] += taken
        count[name.partition("[")[0]] += 1
    return [(name, taken, count[name]) for name, taken in seconds.most_common()]


def main(path, fast=""):
    found = durations(path)
    print(f"{len(found)} tests, {sum(found.values()) / 60:.1f} minutes on one core")
    if not fast:
        for name, taken, count in functions(found)[:SHOWN]:
            print(f"{taken:8.1f} s {count:5} {name}")
        return 0
    long = [(name, taken) for name, taken in found.most_common() if taken > LONG_S]
    for name, taken in long:
        print(f"{taken:8.1f} s {name}")
    if long:
        print(f"longer than {LONG_S:.0f} s: mark them pytest.mark.slow, or make them quick")
    return int(any(taken > REFUSED_S for _, taken in long))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
