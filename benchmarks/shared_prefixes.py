"""Shuffled records that share passages: the questions of the first N groups of a JSONL whose contexts repeat.

    python benchmarks/shared_prefixes.py xquad_shared.jsonl 16 > shuffled.jsonl

A group is the records of one first context. The order is that of seed 0.
"""

import json
import random
import sys


def main(path: str, groups: int) -> None:
    """Write the records of the first `groups` contexts, shuffled, to stdout."""
    chosen: dict[str, list[str]] = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            context = json.loads(line)["contexts"][0]
            key = json.dumps(context, sort_keys=True)
            if key in chosen or len(chosen) < groups:
                chosen.setdefault(key, []).append(line)
    lines = [line for group in chosen.values() for line in group]
    random.Random(0).shuffle(lines)
    sys.stdout.writelines(lines)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
