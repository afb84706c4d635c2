"""This folder's C++ kernels, built once by this machine's compiler and kept in the user's cache.

    >>> kernels = build(head=64); kernels.linear(x, kernels.pack(weight), n, bias)

Limit: CPUs, float32, head sizes that are multiples of 8. Linked against the OpenMP that torch has loaded: a second one
would compete for the cores.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ragspec.engine.model.kv_splits import KvSplits
from ragspec.host.compiler import build_library

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-march=native", "-fopenmp")
# some compilers reorder sums unless told not to
ARITHMETIC = ("-fno-fast-math", "-ffp-contract=fast", "-fno-math-errno")
WIDEST_HEAD = 256
PART = 4096  # outputs of a weight checked at a time
KEPT = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # type codes, as in linear.h
POINTER, NUMBER = c_void_p, c_int64
SIGNATURES: dict[str, list[Any]] = {
    "ragspec_pack": [POINTER, NUMBER, NUMBER, POINTER],
    "ragspec_linear": [POINTER, NUMBER, NUMBER, POINTER, NUMBER, NUMBER, POINTER, POINTER, c_int],
    "ragspec_write": [*[POINTER, NUMBER, NUMBER] * 2, POINTER, NUMBER, NUMBER, POINTER, POINTER, NUMBER, NUMBER],
    "ragspec_attend": [
        *[POINTER, NUMBER, NUMBER],  # the query and its strides
        *[POINTER, POINTER, NUMBER, NUMBER, NUMBER, NUMBER],  # the cache
        *[c_float, c_float, POINTER, NUMBER, POINTER, POINTER, NUMBER],  # the work
        *[POINTER, POINTER, c_int],
    ],
}


class Kernels:
    """The functions of a built library. head: the head size for which attention is built."""

    def __init__(self, library: ctypes.CDLL, head: int) -> None:
        self.head = head
        self._library = library
        for name, arguments in SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, None
        self._linear = self._library.ragspec_linear
        self._write = self._library.ragspec_write
        self._attend = self._library.ragspec_attend
        self._library.ragspec_columns.restype = c_int64
        self.columns = int(self._library.ragspec_columns())
        self._library.ragspec_halves.restype = c_int64
        self._short = (torch.bfloat16, torch.float16) if self._library.ragspec_halves() else (torch.bfloat16,)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight of (n, k) in the layout of linear(): (panels, k, columns), in 16 bits if that is exact."""
        weight = weight.contiguous()
        n, k = weight.shape
        packed = weight.new_empty(-(-n // self.columns), k, self.columns)
        self._library.ragspec_pack(weight.data_ptr(), n, k, packed.data_ptr())
        return packed.to(self.kept_as(weight))

    def kept_as(self, weight: torch.Tensor) -> torch.dtype:
        """Return the smallest type that represents a weight exactly: most models are published in 16 bits."""
        return next((dtype for dtype in self._short if has_all(dtype, weight)), torch.float32)

    @staticmethod
    def unpack(packed: torch.Tensor, n: int) -> torch.Tensor:
        """Return the weight that was packed."""
        return packed.transpose(1, 2).flatten(0, 1)[:n].contiguous().float()

    def linear(self, x: torch.Tensor, packed: torch.Tensor, n: int, bias: torch.Tensor | None) -> torch.Tensor:
        """Return (..., n) for x of (..., k). Raises RuntimeError, as torch does, if x does not fit."""
        k = packed.shape[1]
        if x.dtype != torch.float32 or x.shape[-1] != k:
            raise RuntimeError(f"{x.dtype} of {x.shape[-1]} features, where the kernel takes float32 of {k}")
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], n)
        first = None if bias is None else bias.data_ptr()
        tokens, threads = x.numel() // k, torch.get_num_threads()
        kept = KEPT[packed.dtype]
        self._linear(x.data_ptr(), tokens, k, packed.data_ptr(), kept, n, first, y.data_ptr(), threads)
        return y

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor, stores: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Write keys and values, (kv_heads, T, size), to `places`, (T,), of `stores`, (kv_heads, rows, slots, size)."""
        (heads, rows, slots, size), tokens = stores[0].shape, len(places)
        self._write(
            *(keys.data_ptr(), keys.stride(0), keys.stride(1)),
            *(values.data_ptr(), values.stride(0), values.stride(1)),
            *(places.data_ptr(), tokens, size, stores[0].data_ptr(), stores[1].data_ptr(), heads, rows * slots),
        )

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        work: KvSplits,
        out: torch.Tensor,
        cap: float | None = None,
    ) -> None:
        """Write to `out`, (T, heads, size), the attention of queries (heads, T, size) over the cache.

        keys, values: (kv_heads, rows, slots, size). cap: scores become cap * tanh(score / cap). Tokens without splits
        in `work` are left unchanged.
        """
        heads, _, size = query.shape
        kv_heads, rows, slots, _ = keys.shape
        scratch = query.new_empty(work.count * heads * (size + 2))
        self._attend(
            *(query.data_ptr(), query.stride(1), query.stride(0), keys.data_ptr(), values.data_ptr()),
            *(kv_heads, rows, slots, heads // kv_heads, scale, cap or 0.0),
            *(work.pieces.data_ptr(), len(work.pieces), work.entries.data_ptr(), work.parts.data_ptr()),
            *(len(work.parts), scratch.data_ptr(), out.data_ptr(), torch.get_num_threads()),
        )


def has_all(dtype: torch.dtype, weight: torch.Tensor) -> bool:
    """Return whether a type represents every number of a float32 weight exactly."""
    parts = (weight[:1], *torch.split(weight, PART))
    return all(torch.equal(part.to(dtype).float().view(torch.int32), part.view(torch.int32)) for part in parts)


@cache
def build(head: int) -> Kernels:
    """Return the kernels for heads of size `head`, built unless they are cached. Raises Unbuilt."""
    head = head if head % 8 == 0 and 0 < head <= WIDEST_HEAD else 8  # linear layers do not depend on it
    return Kernels(library_of(SOURCE.read_text(encoding="utf-8"), head), head)


def library_of(source: str, head: int) -> ctypes.CDLL:
    """Return C++ that includes this folder's headers as a loaded library, built unless it is cached.

    head: the head size for which attention is built. Raises Unbuilt.
    """
    return build_library(source, [*FLAGS, *ARITHMETIC, f"-DRAGSPEC_HEAD={head}"], SOURCE.parent)
