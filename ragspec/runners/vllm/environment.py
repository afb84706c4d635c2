"""vLLM's surroundings: its environment variables, which it reads as it is imported, and its errors on one line."""

from __future__ import annotations

import os
import warnings

from ragspec.errors import flat


def prepare() -> None:
    """Keep vLLM's log off stdout, which is for records, and its usage statistics at home."""
    from ragspec.host.quiet import quiet

    for name, value in {
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": "INFO" if os.environ.get("RAGSPEC_DEBUG") else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # the engine in this process: an interruption ends it cleanly, and a CPU has nothing to overlap
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }.items():
        os.environ.setdefault(name, value)
    if not os.environ.get("RAGSPEC_DEBUG"):
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    quiet()


def device_count() -> int:
    """Return how many GPUs torch sees."""
    import torch

    return torch.cuda.device_count()


def one_line(error: Exception) -> str:
    """Return the error's type and text, as one line."""
    text = flat(error) or "no message"
    return f"{type(error).__name__}: {text[:400]}"
