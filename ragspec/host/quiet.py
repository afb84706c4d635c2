"""transformers and the hub's client talk on stderr while they load; the run's own bar and messages are enough."""

from __future__ import annotations

import os
import sys
from logging import ERROR, getLogger


def quiet() -> None:
    """Silence progress bars and messages below errors, the hub client's retries among them."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported
    from transformers.utils import logging

    getLogger("huggingface_hub").setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
