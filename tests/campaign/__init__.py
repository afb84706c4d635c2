"""Faults by the hundred, at random: kills, mutated lines and configs, damaged archives, numbers, schemas, templates.

    python -m tests.campaign                             # all of it: about half an hour
    python -m tests.campaign --only lines --lines 300    # a part of it
    python -m tests.campaign --seed 7                    # other faults

Each part says what it did and what it found; a guarantee that does not hold ends it with the seed and what is needed to
see it again. `tests/test_campaign.py` runs a few faults of each kind.
"""
