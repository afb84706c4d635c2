"""Silence transformers and the hub client on stderr while they load; the run has its own progress bar and messages."""

from __future__ import annotations

import os
import sys
from logging import ERROR, getLogger


def quiet() -> None:
    """Silence progress bars and messages below errors, including the hub client's retries."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported
    from transformers.utils import logging

    for library in ("huggingface_hub", "torchao", "torch.utils._pytree"):  # torchao tries code for other machines
        getLogger(library).setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
