"""The `ragspec` command, also as `python -m ragspec`. Ctrl-C ends it quietly even while modules are imported."""

import atexit
import gc
import sys


def main() -> None:
    """Run the command line."""
    atexit.register(gc.disable)  # looking through all that torch imported takes a quarter of a second, for nothing
    try:
        from ragspec.cli import main as run

        run()
    except KeyboardInterrupt:  # during the imports; afterwards the command handles it
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
