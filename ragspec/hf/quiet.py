"""transformers talks on stderr while it loads; the run's own bar and messages are enough."""

from __future__ import annotations


def quiet() -> None:
    """Silence transformers' progress bars and its messages below errors."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
