"""The console that people read: stderr, so that stdout is free for records."""

from __future__ import annotations

import sys

from rich.console import Console

PIPED_WIDTH = 120


def stderr() -> Console:
    """Return a console on stderr: a terminal gets lines broken at words; a file gets them whole, without colour."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    width = None if terminal else PIPED_WIDTH
    # without emoji: line 100 of a file is no :100:
    return Console(stderr=True, soft_wrap=not terminal, highlight=False, emoji=False, width=width)
