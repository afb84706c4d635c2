"""The `ragspec` command, also as `python -m ragspec`: nothing is imported before an interruption ends it quietly."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from ragspec.cli import main as run

        run()
    except KeyboardInterrupt:  # while all this is imported; later on, the command says more
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
