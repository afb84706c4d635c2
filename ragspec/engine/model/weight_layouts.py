"""Layouts of a linear layer's weight on a CPU, and PackedLinear, which uses the fastest for each number of tokens.

No layout is best everywhere: it depends on the processor, the layer's shape and the number of tokens, so layouts are
timed when a model has loaded, if the machine is otherwise idle. A second layout is kept where that takes little of the
free memory: decoding and prompts often prefer different ones. Limit: float32. Weights that another module shares (tied
embeddings) are kept besides.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from math import prod
from statistics import median
from typing import Any, Protocol

import torch
from torch.nn.functional import linear

from ragspec.engine.model.layer_graph import CAPTURING
from ragspec.engine.native.kernels import Kernels
from ragspec.host.cache import JsonCache
from ragspec.host.machine import cpu_features, free_bytes
from ragspec.host.waiting import Waiting

POINTS = (1, 4, 16, 64, 512)  # numbers of tokens at which layouts are timed
FEW = 64  # most tokens of a decoding step; more belong to a prompt
REPEATS = 5  # of each layout, alternating
STREAMED = 256 << 20  # bytes of weights timed with few tokens: more than the processor's cache holds
COMPUTED = 32 << 20  # bytes of weights timed with many tokens, whose cost is arithmetic
WIDEST = 8192  # outputs; a wider layer is the output layer, which few tokens pass
LEAST_S = 0.3  # seconds of timing after which it is known whether the machine is idle
UNDISTURBED = 0.8  # share of the threads' time needed then; 0.96 on an idle machine, 0.5 beside two other processes
ROUNDING = 64  # tokens for which oneDNN lays out weights; it makes no difference

Shape = tuple[int, int]  # outputs, inputs
Seconds = dict[Shape, dict[str, list[float]]]  # by shape and layout, at each of POINTS


class NoisyMachineError(Exception):
    """Other processes use the cores, so timings are theirs, and take 25 times as long."""


class WeightLayout(Protocol):
    """A weight of (n, k), laid out for one way of multiplying by it."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return (..., n) for x of (..., k)."""

    def dense(self) -> torch.Tensor:
        """Return the weight in torch's layout."""


class TorchLayout:
    """torch's own layout."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = linear(x, self._weight, bias)
        return result

    def dense(self) -> torch.Tensor:
        return self._weight


class OneDnnLayout:
    """oneDNN's layout."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROUNDING)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")
        return result

    def dense(self) -> torch.Tensor:
        weight: torch.Tensor = self._weight.to_dense()
        return weight


class NativeLayout:
    """The layout of our own kernels (native/)."""

    def __init__(self, weight: torch.Tensor, kernels: Kernels) -> None:
        self._kernels = kernels
        self._outputs = weight.shape[0]
        self.packed = kernels.pack(weight)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._kernels.linear(x, self.packed, self._outputs, bias)

    def dense(self) -> torch.Tensor:
        return self._kernels.unpack(self.packed, self._outputs)


MEASURED = JsonCache("forms")
Makers = Mapping[str, Callable[[torch.Tensor], WeightLayout]]


def makers(kernels: Kernels | None) -> dict[str, Callable[[torch.Tensor], WeightLayout]]:
    """Return the layouts of this machine, by name. kernels: None if they are not built."""
    forms: dict[str, Callable[[torch.Tensor], WeightLayout]] = {"torch": TorchLayout}
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        forms["onednn"] = OneDnnLayout
    if kernels is not None:
        forms["native"] = lambda weight: NativeLayout(weight, kernels)
    return forms


def measured(weights: Sequence[torch.Tensor], kernels: Kernels | None) -> Seconds:
    """Return the result of measure() for all layouts, measured once, so that compared processes compute alike.

    It is kept in the user's cache, if that is writable, and otherwise measured each time. Raises NoisyMachineError, and
    keeps nothing then.
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
    with suppress(TypeError, ValueError):  # nothing is known, or the file says something else
        return {(n, k): each for n, k, each in MEASURED.read(*depends)}
    seconds = measure(weights, forms)
    # where memory was too short to try them all, there may be more another time
    if all(shape in seconds or size > STREAMED for shape, size in sizes.items()):
        MEASURED.write([(n, k, each) for (n, k), each in seconds.items()], *depends)
    return seconds


def _kept(weights: Sequence[torch.Tensor], kernels: Kernels) -> list[tuple[Shape, str]]:
    """Return the type in which our kernels hold the first weight of each shape."""
    firsts = {(weight.shape[0], weight.shape[1]): weight for weight in reversed(weights)}
    return sorted((shape, str(kernels.kept_as(weight))) for shape, weight in firsts.items())


@torch.inference_mode()
def measure(weights: Iterable[torch.Tensor], forms: Makers, *, patient: bool = False) -> Seconds:
    """Return the seconds of a layer of each shape in each layout, at each of POINTS.

    Layouts are timed alternately, and the median counts, so that a moment's slowdown does not matter. Shapes too large
    to copy for a trial are left out. Raises NoisyMachineError, unless `patient`.
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
                raise NoisyMachineError
        for (shape, name), each_s in taken.items():
            seconds[shape][name][at] = median(each_s)
    return dict(seconds)


def estimated(weights: Iterable[torch.Tensor], forms: Makers) -> Seconds:
    """Return the result of measure() with one thread: on a busy machine, several would mostly wait for each other."""
    with one_thread():
        return measure(weights, forms, patient=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch compute with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def timings(made: Sequence[tuple[torch.Size, WeightLayout]], tokens: int) -> Iterator[tuple[Shape, float]]:
    """Yield the seconds of each layer, run one after the other as in a forward."""
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
    """Return the layout for 0, 1, 2, ... tokens, the last one for all beyond. several: more than one may be kept.

    If only one may be kept, it is the one that loses least over all points.
    """
    timed = [at for at in range(len(POINTS)) if min(each[at] for each in seconds.values()) < float("inf")]
    least = {at: min(each[at] for each in seconds.values()) for at in timed}
    if not several:
        return (min(seconds, key=lambda name: sum(seconds[name][at] / least[at] for at in timed)),)
    fastest = {at: min(seconds, key=lambda name: seconds[name][at]) for at in timed}
    at_points = [fastest[min(at, timed[-1])] for at in range(len(POINTS))]
    # between two points, take the layout of the nearer one by ratio, that is, up to their geometric mean
    edges = [int((one * two) ** 0.5) for one, two in pairwise(POINTS)]
    return tuple(at_points[bisect_left(edges, tokens)] for tokens in range(edges[-1] + 2))


# -- packed layers ---------------------------------------------------------------------------------

log = logging.getLogger(__name__)
TRIED = (1, 17, 65)  # numbers of tokens at which a layer's layouts are compared
MANY = 200  # also compared for the first layer of each shape: kernels compute so many tokens in another way
TOLERANCE = 1e-4  # of the largest output; more is not rounding
SHARE = 0.1  # of free memory that further layouts may take


class PackedLinear(torch.nn.Module):
    """Computes what the Linear it was made from computes.

    forms: its weight by layout name. choice: the layout name for 0, 1, 2, ... tokens. shared: the weight itself, if
    another module has it too.
    """

    def __init__(
        self, linear: torch.nn.Linear, forms: Mapping[str, WeightLayout], choice: Sequence[str], shared: Any = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._forms = dict(forms)
        self._choice = choice
        self._shared = [shared]  # in a list, so that it is not registered: it is the other module's parameter

    @property
    def weight(self) -> torch.Tensor:
        """(out_features, in_features), for code that reads a layer's weight."""
        return self.unpacked().weight

    @property
    def choice(self) -> tuple[str, ...]:
        """The layout name for 0, 1, 2, ... tokens."""
        return tuple(self._choice)

    @property
    def native(self) -> torch.Tensor | None:
        """Its weight in our kernels' layout, if it has that."""
        form = self._forms.get("native")
        return form.packed if isinstance(form, NativeLayout) else None

    def unpacked(self) -> torch.nn.Linear:
        """Return the Linear that it was made from."""
        linear = torch.nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        (shared,) = self._shared
        if shared is None:
            form = self._forms.get("torch") or next(iter(self._forms.values()))
            shared = torch.nn.Parameter(form.dense(), requires_grad=False)
        linear.weight, linear.bias = shared, self.bias
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., out_features) for x of (..., in_features)."""
        parts = CAPTURING.get()
        if parts is not None:
            return parts.linear(x, self, self.out_features)
        return self._forms[self._choice[min(x.shape[-2], len(self._choice) - 1)]](x, self.bias)


def is_plain(module: torch.nn.Module) -> bool:
    """Return whether a module is a Linear of ordinary numbers. Libraries that quantise replace the module or its weight
    by a subclass, which computes something else.
    """
    return type(module) is torch.nn.Linear and type(module.weight) is torch.nn.Parameter


def stored_bytes(weight: torch.Tensor) -> int:
    """Return the bytes of a weight. One that torchao quantised is made of several tensors, and its own size is that of
    the numbers it stands for.
    """
    flatten = getattr(weight, "__tensor_flatten__", None)
    if flatten is None:
        return weight.nbytes
    return sum(stored_bytes(getattr(weight, name)) for name in flatten()[0])


def can_pack(model: torch.nn.Module) -> bool:
    """Return whether this machine may have better layouts for this model's weights."""
    weight = next(model.parameters())
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def pack_linears(model: torch.nn.Module, kernels: Kernels | None = None) -> list[str]:
    """Replace every Linear of `model` in place; return the names of those left because their results would change.

    kernels: our own, if they are built. Each weight is freed as it is replaced, unless something else holds it.
    """
    found = [
        (module, name, f"{path}.{name}")
        for path, module in model.named_modules()
        for name, child in module.named_children()
        if is_plain(child) and can_pack(child) and child.weight.numel()  # some experts are of size 0
    ]
    makes = makers(kernels)
    if len(makes) == 1 or not found:
        return []
    choices = chosen_forms([getattr(module, name) for module, name, _ in found], kernels)
    shared = _shared(model)
    left = []
    known: set[Shape] = set()
    waiting = Waiting()
    for module, name, path in found:
        child = getattr(module, name)
        shape = child.out_features, child.in_features
        weight, choice = child.weight.detach(), choices[shape]
        forms = {each: makes[each](weight) for each in dict.fromkeys(choice)}
        packed = PackedLinear(child, forms, choice, child.weight if child.weight.data_ptr() in shared else None)
        with waiting:
            differs = packed_differs(forms, child, TRIED if shape in known else (*TRIED, MANY))
        if differs:
            left.append(path)
        else:
            setattr(module, name, packed)
        known.add(shape)
    return left


def chosen_forms(linears: Sequence[torch.nn.Linear], kernels: Kernels | None) -> dict[Shape, tuple[str, ...]]:
    """Return the layout for each number of tokens, by shape."""
    weights = [linear.weight.detach() for linear in linears]
    try:
        seconds = measured(weights, kernels)
    except NoisyMachineError:
        log.info("the machine is busy: linear layers are timed with one thread, and the result is not kept")
        seconds = estimated(weights, makers(kernels))
    if not seconds:
        return {(linear.out_features, linear.in_features): ("torch",) for linear in linears}
    largest = max(seconds, key=prod)
    for weight in weights:  # treat shapes too large to time like the largest one timed
        seconds.setdefault((weight.shape[0], weight.shape[1]), seconds[largest])
    several = {shape: best(found, several=True) for shape, found in seconds.items()}
    further = sum((len(set(several[w.shape[0], w.shape[1]])) - 1) * w.nbytes for w in weights)
    if further <= SHARE * free_bytes():
        return several
    return {shape: best(found, several=False) for shape, found in seconds.items()}


def unpack_linears(model: torch.nn.Module) -> None:
    """Undo pack_linears."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, PackedLinear):
                setattr(module, name, child.unpacked())


def _shared(model: torch.nn.Module) -> set[int]:
    """Return the addresses of weights that several modules share (tied embeddings)."""
    addresses = [parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False)]
    return {address for address, count in Counter(addresses).items() if count > 1}


@torch.inference_mode()
def packed_differs(forms: Mapping[str, WeightLayout], linear: torch.nn.Linear, tried: Sequence[int]) -> bool:
    """Return whether one of a layer's layouts computes something else. tried: numbers of tokens."""
    for tokens in tried:
        x = torch.linspace(-1, 1, tokens * linear.in_features).view(tokens, -1).sin()
        expected = linear(x)
        for form in forms.values():
            if not (form(x, linear.bias) - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp_min(1e-6):
                return True
    return False
