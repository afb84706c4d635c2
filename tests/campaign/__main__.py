import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.campaign import __doc__ as about
from tests.campaign import archives, configs, faults, lines, numbers, parts, templates, workers, wrappers
from tests.campaign.forked import preload

# those that fork come before the one that brings torch and its threads into this process
PARTS = {
    "lines": (lines, 10_000),
    "configs": (configs, 1000),
    "archives": (archives, 200),
    "numbers": (numbers, 10_000),
    "wrappers": (wrappers, 10_000),
    "parts": (parts, 100),
    "workers": (workers, 100),
    "faults": (faults, 200),
    "templates": (templates, 1000),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=about.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for what the runs leave")
    parser.add_argument("--model", help="the folder of a tiny model, else one is built")
    for name, (_, count) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=count, help=f"how many ({count:,})")
    args = parser.parse_args()
    preload()
    with tempfile.TemporaryDirectory() as folder:
        for name, (part, _) in PARTS.items():
            if args.only and name not in args.only:
                continue
            place = (args.keep or Path(folder)) / f"{name}-{args.seed}"
            place.mkdir(parents=True)
            started = time.monotonic()
            more = {"model": args.model} if name == "faults" else {}
            found = part.campaign(getattr(args, name), args.seed, place, **more)
            print(json.dumps({"part": name, "seed": args.seed, **found, "seconds": round(time.monotonic() - started)}))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
