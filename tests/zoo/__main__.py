"""Writes docs/reference/models.md: `python -m tests.zoo`; with `--check`, fails where it is out of date. Takes minutes.

With `--kernels`, layers are run by our own kernels, too: some minutes more.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import sys

from tests.zoo.crew import judging
from tests.zoo.page import PATH, page
from tests.zoo.table import ENTRIES


def main() -> int:
    outcomes = {}
    kernels = "--kernels" in sys.argv[1:]
    with judging(ENTRIES, kernels) as coming:
        for name, future in coming.items():
            outcomes[name] = future.result()
            print(f"{len(outcomes)}/{len(ENTRIES)} {name}: {outcomes[name]}", file=sys.stderr)
    captured = sum(outcome.captured for outcome in outcomes.values())
    print(f"{captured} of them can be compiled, and answer the same", file=sys.stderr)
    if kernels:
        fused = sum(outcome.fused for outcome in outcomes.values())
        print(f"{fused} of them by our own kernels, one call for a layer", file=sys.stderr)
    text = page(outcomes)
    if "--check" in sys.argv[1:]:
        same = PATH.read_text(encoding="utf-8") == text
        print(f"{PATH} is {'up to' if same else 'out of'} date", file=sys.stderr)
        return 0 if same else 1
    PATH.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
