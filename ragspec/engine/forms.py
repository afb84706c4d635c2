"""The forms that a linear layer's weight can have on a CPU, and which of them is fastest for how many tokens.

No form is best everywhere: it depends on the processor, the layer's shape and the number of tokens, so it is measured
when a model has loaded, if nothing else keeps the machine busy. Limit: float32.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import pairwise
from statistics import median
from typing import Protocol

import torch
from torch.nn.functional import linear

from ragspec.engine.native.kernels import Kernels
from ragspec.host.machine import cpu_features, free_bytes
from ragspec.models.resolve import cache_dir

POINTS = (1, 4, 16, 64, 512)  # tokens at which forms are timed
FEW = 64  # tokens up to which a step decodes; more are a prompt's
REPEATS = 5  # of each form, in turn with the others
STREAMED = 256 << 20  # bytes of weights that few tokens are timed with: more than the processor's cache holds
COMPUTED = 32 << 20  # bytes that many tokens are timed with: arithmetic is what they cost
WIDEST = 8192  # outputs; a wider layer is the output layer, which few tokens go through
LEAST_S = 0.3  # seconds of measuring after which it is known whether others use the processor too
UNDISTURBED = 0.8  # of the threads' time that they then had; 0.96 on a quiet machine, 0.5 where two others ran
ROUNDING = 64  # tokens that oneDNN lays weights out for; it makes no difference

Shape = tuple[int, int]  # outputs, inputs
Seconds = dict[Shape, dict[str, list[float]]]  # at each of POINTS


class Disturbed(Exception):
    """Other processes have the cores: what is measured now is theirs, and takes 25 times as long."""


class Form(Protocol):
    """A weight of (n, k), laid out for one way of multiplying with it."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return (..., n) for x of (..., k)."""

    def dense(self) -> torch.Tensor:
        """Return the weight as it was."""


class Plain:
    """As torch has it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = linear(x, self._weight, bias)
        return result

    def dense(self) -> torch.Tensor:
        return self._weight


class OneDnn:
    """In oneDNN's own layout."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROUNDING)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")
        return result

    def dense(self) -> torch.Tensor:
        weight: torch.Tensor = self._weight.to_dense()
        return weight


class Native:
    """For our own kernels (native/)."""

    def __init__(self, weight: torch.Tensor, kernels: Kernels) -> None:
        self._kernels = kernels
        self._outputs = weight.shape[0]
        self.packed = kernels.pack(weight)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._kernels.linear(x, self.packed, self._outputs, bias)

    def dense(self) -> torch.Tensor:
        return self._kernels.unpack(self.packed, self._outputs)


Makers = Mapping[str, Callable[[torch.Tensor], Form]]


def makers(kernels: Kernels | None) -> dict[str, Callable[[torch.Tensor], Form]]:
    """Return the forms that this machine has, by name. kernels: None where they are not built."""
    forms: dict[str, Callable[[torch.Tensor], Form]] = {"torch": Plain}
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        forms["onednn"] = OneDnn
    if kernels is not None:
        forms["native"] = lambda weight: Native(weight, kernels)
    return forms


def measured(weights: Sequence[torch.Tensor], kernels: Kernels | None) -> Seconds:
    """Return what measure() says of all forms, once and for all: processes that are compared should compute alike.

    It is kept in the user's cache, if that can be written; without the file there it is measured anew. Raises
    Disturbed, and keeps nothing.
    """
    forms = makers(kernels)
    sizes = {(weight.shape[0], weight.shape[1]): weight.nbytes for weight in weights}
    shapes = sorted(sizes)
    depends = [
        "medians",
        list(forms),
        shapes,
        _kept(weights, kernels) if kernels else (),
        POINTS,
        STREAMED,
        torch.get_num_threads(),
        torch.__version__,
        cpu_features(),
    ]
    name = f"{blake2b(repr(depends).encode(), digest_size=12).hexdigest()}.json"
    try:
        known = json.loads((cache_dir() / "forms" / name).read_text(encoding="utf-8"))
        return {(n, k): each for n, k, each in known}
    except (OSError, RuntimeError, ValueError):  # there is no such file, or no such folder
        seconds = measure(weights, forms)
    if any(shape not in seconds and size <= STREAMED for shape, size in sizes.items()):
        return seconds  # memory was too short to try them all; another time there may be more
    with suppress(OSError, RuntimeError):
        folder = cache_dir() / "forms"
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{name}.{os.getpid()}"
        draft.write_text(json.dumps([(n, k, each) for (n, k), each in seconds.items()]), encoding="utf-8")
        draft.replace(folder / name)
    return seconds


def _kept(weights: Sequence[torch.Tensor], kernels: Kernels) -> list[tuple[Shape, str]]:
    """Return in which type our kernels read the first weight of each shape."""
    firsts = {(weight.shape[0], weight.shape[1]): weight for weight in reversed(weights)}
    return sorted((shape, str(kernels.kept_as(weight))) for shape, weight in firsts.items())


@torch.inference_mode()
def measure(weights: Iterable[torch.Tensor], forms: Makers, *, patient: bool = False) -> Seconds:
    """Return what a layer of each shape takes in each form, in seconds, at each of POINTS.

    All forms are timed in turn, and the median counts: whatever slows the machine down for a moment tells nothing of a
    form. Shapes so large that a copy for a trial would need much memory are left out. Raises Disturbed, unless patient.
    """
    started, worked = time.perf_counter(), time.process_time()
    most = min(STREAMED, free_bytes() // (2 * len(forms)))
    some = _sample([weight for weight in weights if weight.nbytes <= most], most)
    made = {name: [(weight.shape, make(weight)) for weight in some] for name, make in forms.items()}
    seconds: Seconds = defaultdict(lambda: {name: [float("inf")] * len(POINTS) for name in forms})
    for at, tokens in enumerate(POINTS):
        count = len(some) if tokens < FEW else len(_sample(some, COMPUTED))
        taken: dict[tuple[Shape, str], list[float]] = defaultdict(list)
        for _ in range(REPEATS):
            for name, each in made.items():
                for shape, spent in timings(each[:count], tokens):
                    taken[shape, name].append(spent)
            passed = time.perf_counter() - started
            share = (time.process_time() - worked) / passed / torch.get_num_threads()
            if not patient and passed > LEAST_S and share < UNDISTURBED:
                raise Disturbed
        for (shape, name), each_s in taken.items():
            seconds[shape][name][at] = median(each_s)
    return dict(seconds)


def estimated(weights: Iterable[torch.Tensor], forms: Makers) -> Seconds:
    """Return what measure() says with one thread: where others have the cores, several mostly wait for each other."""
    with one_thread():
        return measure(weights, forms, patient=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def timings(made: Sequence[tuple[torch.Size, Form]], tokens: int) -> Iterator[tuple[Shape, float]]:
    """Yield the seconds of each layer, one layer after the other as in a forward."""
    inputs = {shape[1]: torch.ones(1, tokens, shape[1]) for shape, _ in made}
    for shape, form in made:
        if shape[0] > WIDEST and tokens > FEW:
            continue
        started = time.perf_counter()
        form(inputs[shape[1]], None)
        yield (shape[0], shape[1]), time.perf_counter() - started


def _sample(weights: Sequence[torch.Tensor], most: int) -> list[torch.Tensor]:
    """Return one weight of each shape, then others in order, up to `most` bytes."""
    firsts: dict[torch.Size, int] = {}
    for at, weight in enumerate(weights):
        firsts.setdefault(weight.shape, at)
    chosen = list(firsts.values())
    size = sum(weights[at].nbytes for at in chosen)
    for at, weight in enumerate(weights):
        if at not in firsts.values() and size + weight.nbytes <= most:
            chosen.append(at)
            size += weight.nbytes
    return [weights[at] for at in chosen]


def best(seconds: Mapping[str, Sequence[float]], several: bool) -> tuple[str, ...]:
    """Return the form for 0, 1, 2, ... tokens; its last one is for all beyond. several: more than one may be kept.

    Where only one may be, it is the one that loses least, all points taken together.
    """
    timed = [at for at in range(len(POINTS)) if min(each[at] for each in seconds.values()) < float("inf")]
    least = {at: min(each[at] for each in seconds.values()) for at in timed}
    if not several:
        return (min(seconds, key=lambda name: sum(seconds[name][at] / least[at] for at in timed)),)
    fastest = {at: min(seconds, key=lambda name: seconds[name][at]) for at in timed}
    at_points = [fastest[min(at, timed[-1])] for at in range(len(POINTS))]
    # between two points, that of the nearer one: nearer by their ratio, so up to their geometric mean
    edges = [int((one * two) ** 0.5) for one, two in pairwise(POINTS)]
    return tuple(at_points[bisect_left(edges, tokens)] for tokens in range(edges[-1] + 2))
