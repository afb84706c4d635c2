"""`python -m ragspec` is the `ragspec` command."""

from ragspec.cli import main

if __name__ == "__main__":
    main()
