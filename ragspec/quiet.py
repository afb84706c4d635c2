"""transformers talks on stderr while it loads; the run's own bar and messages are enough."""

from __future__ import annotations

import os
import sys


def quiet() -> None:
    """Silence transformers' progress bars and its messages below errors."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
