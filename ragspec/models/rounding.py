"""How far two computations of the same logits may be apart: rounding, and nothing else."""

from __future__ import annotations

import torch

OF_LARGEST = {torch.float32: 1e-3, torch.float64: 1e-6}  # of the largest logit; other dtypes: HALF
HALF = 5e-2


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest difference, relative to the largest logit, that counts as rounding."""
    return OF_LARGEST.get(dtype, HALF)
