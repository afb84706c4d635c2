"""The console that people read: stderr, so that stdout is free for records."""

from __future__ import annotations

import sys

from rich.console import Console

PIPED_WIDTH = 120


def stderr() -> Console:
    """Return a console on stderr, without colour if that is not a terminal."""
    return Console(stderr=True, soft_wrap=True, highlight=False, width=None if sys.stderr.isatty() else PIPED_WIDTH)
