"""Kernels that inductor writes for CUDA, on a machine without a GPU: compiled by Triton, or run by its interpreter.

Inductor is given tensors that say they are on such a device and have no data, and what it asks CUDA about is answered
for a GPU of a given kind. Triton needs no GPU to compile for one; whether a kernel fits in its shared memory is checked
where the driver would load it. The interpreter computes what kernels do, on the CPU's tensors.

    python -m tests.engine.cuda_kernels compile 0 1                       # indices in CASES
    TRITON_INTERPRET=1 python -m tests.engine.cuda_kernels interpret 0 1  # and in STEPS

Written for torch 2.13 and Triton 3.9; of each it replaces what only a GPU could answer.
"""
# ruff: noqa: SLF001

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ragspec.engine.backends import paged_attention
from ragspec.engine.backends.cascade import CascadeTensors
from ragspec.engine.backends.paged_attention import TILE, RowGroup, StepTensors, flex, gathered
from ragspec.engine.kv.cache import LayerCache
from ragspec.engine.model.attention import Scores
from ragspec.engine.model.masks import MaskRule

TORCH, TRITON = "2.13", "3.9"
KIB = 1024
# folded constants would have data on the device, and what is cached need not compile
SETTINGS: Any = {
    "compile_threads": 1,
    "fx_graph_cache": False,
    "joint_graph_constant_folding": False,
    "use_static_triton_launcher": False,
}


class Gpu(NamedTuple):
    """A kind of GPU: compute capability, shared memory of a block of threads, in bytes, and multiprocessors."""

    major: int
    minor: int
    shared_memory: int
    multiprocessors: int = 4  # of the smallest, over which a row's blocks are split least


GPUS = {
    "T4": Gpu(7, 5, 64 * KIB),
    "RTX 3090": Gpu(8, 6, 99 * KIB),
    "H100": Gpu(9, 0, 227 * KIB),
    "B200": Gpu(10, 0, 227 * KIB),
    "RTX 5090": Gpu(12, 0, 99 * KIB),
}
# GPU, numbers, size of heads, tokens of a row
CASES = [
    ("H100", "bfloat16", 128, 4),
    ("H100", "bfloat16", 64, TILE),
    ("T4", "float16", 256, TILE),
    ("RTX 3090", "bfloat16", 512, TILE),
    ("RTX 3090", "float32", 512, 1),
    ("B200", "bfloat16", 128, 1),
    ("RTX 5090", "bfloat16", 256, TILE),
]


class Step(NamedTuple):
    """A step whose kernels are interpreted."""

    tokens: int = 1  # of a row
    cap: float | None = None
    sinks: bool = False
    window: int = 0
    exact: bool = False
    cascade: bool = False
    at_once: int | None = None


STEPS = [
    Step(),
    Step(exact=True, window=100),
    Step(4, cap=5.0, sinks=True),
    Step(4, window=100, at_once=16),
    Step(TILE),
    Step(TILE, cap=5.0, sinks=True, window=100),
    Step(TILE, exact=True),
    Step(TILE, at_once=16),
    Step(cascade=True),
    Step(4, cascade=True, sinks=True),
]


@contextmanager
def pretending(gpu: Gpu) -> Iterator[None]:
    """Answer for a GPU what inductor and Triton ask while they compile."""
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    properties = SimpleNamespace(
        name="",
        gcnArchName="",
        major=gpu.major,
        minor=gpu.minor,
        multi_processor_count=gpu.multiprocessors,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=1024,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=1 << 34,
    )
    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", gpu.major * 10 + gpu.minor, 32),
        get_current_device=lambda: 0,
        launcher_cls=lambda *given: None,
        utils=SimpleNamespace(
            get_device_properties=lambda index: {"max_shared_mem": gpu.shared_memory},
            load_binary=lambda *given: (object(), object(), 0, 0, 1024),
            unload_module=lambda module: None,
        ),
    )
    of_any_device: dict[str, Any] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda *given, **more: gpu.major >= 8,
        "synchronize": lambda device=None: None,
    }
    of_torch = of_any_device | {
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "get_device_capability": lambda device=None: (gpu.major, gpu.minor),
        "get_rng_state": lambda *given: torch.zeros(16, dtype=torch.uint8),
        "is_available": lambda: True,
        "set_device": lambda device: None,
        "set_rng_state": lambda *given: None,
    }
    of_interface = of_any_device | {
        "exchange_device": lambda index: 0,
        "get_raw_stream": lambda index: 0,
        "maybe_exchange_device": lambda index: 0,
    }
    caches: list[Any] = [_triton.has_triton, DeviceProperties.create]
    with ExitStack() as stack:
        change = lambda *given, **more: stack.enter_context(patch.object(*given, **more))  # noqa: E731
        for name, answer in of_torch.items():
            change(torch.cuda, name, answer)
        for name, answer in of_interface.items():
            change(device_interface.CudaInterface, name, staticmethod(answer))
        change(device_interface, "caching_worker_device_properties", {"cuda": [properties]})
        change(device_interface, "caching_worker_current_devices", {"cuda": 0})
        change(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True)
        change(torch._C._dynamo.guards, "_empty_strided_cuda", torch._C._dynamo.guards._empty_strided_cpu)
        for passes in (joint_graph, post_grad):  # they look for patterns of attention, with tensors that have data
            change(passes, "lazy_init", lambda *given: None)
        change(triton_helpers, "set_driver_to_gpu", lambda: None)
        change(driver, "_active", device)
        change(torch.Tensor, "__getitem__", item)
        for cached in caches:
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        yield


def elsewhere(
    gpu: Gpu, made: Callable[[Any], Any], graph: torch.fx.GraphModule, given: list[Any]
) -> Callable[..., Any]:
    """Compile a graph of a CPU's tensors for a GPU, as a backend of torch.compile. made: what runs a kernel."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensor

    def moved(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        with value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    def kernel(compiler: Any, name: str, source: str, **more: str) -> Any:
        return made(getattr(PyCodeCache.load(source), name))

    for node in graph.graph.nodes:
        if "example_value" in node.meta:
            node.meta["example_value"] = moved(node.meta["example_value"])
    inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    with pretending(gpu), patch.object(AsyncCompile, "triton", kernel):
        compiled = compile_fx(graph, inputs)

    def run(*args: Any) -> Any:
        with pretending(gpu):
            return compiled(*args)

    return run


class Loaded:
    """A kernel that is compiled and loaded, as far as that goes, and does nothing."""

    def __init__(self, kernel: Any) -> None:
        kernel.precompile()

    def run(self, *args: Any, **more: Any) -> None:
        """Do nothing."""


class Interpreted:
    """A kernel that Triton's interpreter runs."""

    ran: set[str] = set()

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def run(self, *args: Any, stream: int) -> None:
        """Run it for each point of its grid, in order."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        kernel, config = self._kernel, self._kernel.configs[0]
        names = [name for name in kernel.fn.arg_names if name not in config.kwargs]
        given, sizes = dict(zip(names, args, strict=False)), args[len(names) :]
        scope = given | config.kwargs | {f"_grid_{i}": size for i, size in enumerate(sizes)}
        found = GridExpr.from_meta(kernel.inductor_meta, config)
        for line in found.prefix:
            exec(line, scope)
        grid = tuple(eval(str(each), scope) for each in (found.x_grid, found.y_grid, found.z_grid))
        kernel.fn.run(**given, **config.kwargs, grid=grid, warmup=False)
        self.ran.add(kernel.inductor_meta["kernel_name"])


def interpretable() -> None:
    """Replace what the interpreter lacks: functions of CUDA's library, and reductions by a function."""
    import triton.language as tl
    from torch._inductor.runtime import triton_helpers

    replaced = {
        "exp": lambda x: tl.exp(x),
        "exp2": lambda x: tl.exp2(x),
        "isinf": lambda x: tl.abs(x) == float("inf"),
        "isnan": lambda x: x != x,
        "log1p": lambda x: tl.log(1 + x),
        "log2": lambda x: tl.log2(x),
        "tanh": lambda x: 2 * tl.sigmoid(2 * x) - 1,
    }
    for name, function in replaced.items():
        setattr(triton_helpers.libdevice, name, function)
    triton_helpers.max2 = lambda values, axis: tl.max(values, axis)


def without_copies() -> None:
    """Let a tensor without data be copied to another of other strides, which torch built without CUDA refuses."""
    hop = sys.modules["torch._higher_order_ops.flex_attention"]
    permuted = hop._permute_strides

    def alike(out: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        with patch.object(type(out), "copy_", lambda self, other: self):
            return permuted(out, strides)

    hop._permute_strides = alike


def item(value: torch.Tensor, index: Any) -> torch.Tensor:
    """Return value[index], without the device's guard, which torch built without CUDA lacks."""
    parts = index if isinstance(index, tuple) else (index,)
    if value.device.type != "cuda" or not all(known(each) for each in parts):
        return torch._C.TensorBase.__getitem__(value, index)
    found: list[torch.Tensor | None] = []
    for each in parts:
        if each is None:
            value = value.unsqueeze(len(found))
        if each is Ellipsis:  # last but for None
            found += [None] * (value.dim() - len(found))
        else:
            found.append(each if isinstance(each, torch.Tensor) else None)
    return torch.ops.aten.index(value, found) if any(each is not None for each in found) else value


def known(part: Any) -> bool:
    """Return whether item() knows a part of an index."""
    return part is None or part is Ellipsis or isinstance(part, torch.Tensor) or part == slice(None)


def compile_case(gpu: str, dtype: str, head_dim: int, tokens: int) -> list[str]:
    """Compute a step's attention with kernels that do nothing; return the notes."""
    rows, heads, kv_heads, blocks, size = 4, 8, 2, 12, 128
    numbers = getattr(torch, dtype)
    cache: Any = SimpleNamespace(size=size, blocks=blocks)
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    tables = torch.arange(rows)[:, None] + torch.zeros(2, dtype=torch.long)
    group = RowGroup(cache, StepTensors(ids, torch.full((rows,), 130), torch.full((rows,), tokens), tables))
    stores = (torch.zeros(kv_heads, blocks * size, head_dim, dtype=numbers) for _ in range(2))
    queries = torch.zeros(rows, heads, tokens, head_dim, dtype=numbers)
    notes: list[str] = []
    with compiling_for(GPUS[gpu], Loaded):
        flex(True, notes)(group, LayerCache(*stores), queries, Scores(1.0, None, None), None)
    return notes


@contextmanager
def compiling_for(gpu: Gpu, made: Callable[[Any], Any]) -> Iterator[None]:
    """Let torch.compile() write kernels for a GPU, and lists of blocks be as they are there."""
    torch._dynamo.reset()
    backend = partial(elsewhere, gpu, made)
    with (
        patch.object(torch, "compile", partial(torch.compile, backend=backend)),
        patch.object(paged_attention, "pad", lambda tensor, sizes: tensor),
        torch._inductor.config.patch(**SETTINGS),
    ):
        yield


def interpret_step(step: Step) -> dict[str, Any]:
    """Compute a step's attention with kernels that are interpreted; return how it differs from gathered blocks'."""
    heads, kv_heads, head_dim, blocks, size, tokens = 4, 2, 16, 10, 128, step.tokens
    torch.manual_seed(tokens)
    cache: Any = SimpleNamespace(size=size, blocks=blocks)
    starts, counts = torch.tensor([0, 200, 150]), torch.tensor([tokens, 1, tokens])
    tables = torch.randperm(blocks - 1)[:9].view(3, 3) + 1
    tables[2, 0] = tables[1, 0]
    shared = CascadeTensors(
        tables=torch.stack([torch.zeros(1, dtype=torch.long), tables[1, :1]]),
        blocks=torch.tensor([0, 1]),
        members=torch.tensor([[0, 0], [1, 2]]),
        places=torch.tensor([0, 2, 3]),
        covered=torch.tensor([0, 1, 1]),
    )
    ids = torch.zeros(3, tokens, dtype=torch.long)
    given = StepTensors(ids, starts, counts, tables, cascade=shared if step.cascade else None)
    group = RowGroup(cache, given)
    layer = LayerCache(*(torch.randn(kv_heads, blocks * size, head_dim) for _ in range(2)))
    queries = torch.randn(3, heads, tokens, head_dim)
    scores = Scores(0.25, step.cap, torch.randn(heads) if step.sinks else None)
    rule = MaskRule(lambda b, h, q, kv: (kv <= q) & (q - kv < step.window)) if step.window else None
    notes: list[str] = []
    Interpreted.ran.clear()
    with compiling_for(GPUS["H100"], Interpreted), patch.object(paged_attention, "AT_ONCE", (step.at_once,)):
        found = flex(True, notes, step.exact)(group, layer, queries, scores, rule)
    difference = (found - gathered(group, layer, queries, scores, rule)).abs().amax((1, 3))
    real = torch.arange(tokens) < counts[:, None]
    return {"difference": difference[real].max().item(), "notes": notes, "ran": sorted(Interpreted.ran)}


def main(how: str, *names: str) -> None:
    """Print a line of JSON for each case."""
    without_copies()
    if how == "compile":
        for case in names:
            print(json.dumps(compile_case(*CASES[int(case)])), flush=True)
    else:
        interpretable()
        for case in names:
            print(json.dumps(interpret_step(STEPS[int(case)])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
