"""Graphs as programs of our own kernels: their C++ computes what torch computes, and what it cannot is refused."""

import ctypes
import shutil

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ragspec.engine.model.layer_graph import Graph, NotCaptured, Parts, _open
from ragspec.engine.native.graph_reader import program_of
from ragspec.engine.native.kernels import library_of
from ragspec.engine.native.layer import Call
from ragspec.engine.native.source import source_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
TOKENS = 41  # while captured: no other size here


def graph_of(function, shapes):
    """Return a function's graph. shapes: of what it is given, "T" where the tokens are."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    given = [torch.zeros([TOKENS if size == "T" else size for size in shape]) for shape in shapes]
    examples = [_open(mode, tensor, TOKENS, number) for number, tensor in enumerate(given)]
    module = make_fx(lambda *tensors: [function(*tensors)], tracing_mode="symbolic")(*examples)
    return Graph(torch.nn.Identity(), module, examples, Parts(), True)


def pointers(tensors):
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def computed(function, shapes, tokens, scale=3.0):
    """Return what the C++ of a function makes of some numbers, and what torch does."""
    program = program_of(graph_of(function, shapes), owned=0)
    source, scratch = source_of(program)
    torch.manual_seed(tokens)
    given = [scale * torch.randn([tokens if size == "T" else size for size in shape]) for shape in shapes]
    expected = function(*given)
    found, room = torch.full_like(expected, float("nan")), torch.empty(max(1, scratch * tokens))
    call = Call(tokens=tokens, threads=2, scratch=room.data_ptr())
    asked, answers = pointers(given), pointers([found])
    call.given, call.result = ctypes.addressof(asked), ctypes.addressof(answers)
    library_of(source, 8).ragspec_layer(ctypes.byref(call), None, None)
    return found, expected


WORD = [(1, "T", 24)]
PAIR = [(1, "T", 24), (1, "T", 24)]
HEADS = [(1, "T", 24), (1, "T", 4)]


def rotated(x, turn):
    """As rotary embeddings do it, to heads of 6."""
    heads = x.view(1, -1, 4, 6).transpose(1, 2)
    turn = torch.cat([turn, turn], -1)[..., :6].unsqueeze(1)
    half = torch.cat([-heads[..., 3:], heads[..., :3]], -1)
    return (heads * turn + half * turn).transpose(1, 2).reshape(1, -1, 24)


def interleaved(x, turn):
    heads = x.view(1, -1, 4, 6).transpose(1, 2)
    pairs = torch.stack([-heads[..., 1::2], heads[..., ::2]], -1).flatten(-2)
    return (pairs * turn[..., :1].unsqueeze(1) + heads).transpose(1, 2).flatten(2)


def rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rms_of_heads(x):
    return rms(x.view(1, -1, 4, 6).transpose(1, 2)).transpose(1, 2).reshape(1, -1, 24)


def norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, (24,), weight, bias, 1e-5)


def parts(x):
    a, b, c = x.split([6, 10, 8], -1)
    d, e = x.chunk(2, -1)
    return torch.cat([c, d[..., :10] * b, a, e], -1)


FUNCTIONS = {
    "sum of two": (lambda x, y: torch.add(x, y, alpha=0.5) - y * 0.25, PAIR),
    "numbers": (lambda x: (2.0 - x) * 1e-3 + 1 / (x * x + 1), WORD),
    "powers": (lambda x: x**3 + x**2 + (x * x + 1) ** 0.5 + (x * x + 1) ** -0.5, WORD),
    "rms": (rms, WORD),
    "rms of heads": (rms_of_heads, WORD),
    "layer norm": (norm, [(1, "T", 24), (24,), (24,)]),
    "layer norm without weights": (lambda x: torch.nn.functional.layer_norm(x, (24,)), WORD),
    "weights": (lambda x, weight: x * (1.0 + weight), [(1, "T", 24), (24,)]),
    "rotated": (rotated, HEADS),
    "interleaved": (interleaved, HEADS),
    "parts": (parts, WORD),
    "one of several": (lambda x: x.view(1, -1, 4, 6)[:, :, 2] + x.view(1, -1, 4, 6).select(2, 1), WORD),
    "permuted": (lambda x: x.view(1, -1, 2, 3, 4).permute(0, 1, 4, 2, 3).reshape(1, -1, 24), WORD),
    "repeated": (lambda x: x.view(1, -1, 4, 1, 6)[:, :, :2].expand(1, -1, 2, 2, 6).reshape(1, -1, 24) * x, WORD),
    "a row's sum": (lambda x: x.view(1, -1, 4, 6).sum(-1), WORD),
    "odd sizes": (lambda x, y: torch.cat([x[..., :7], y[..., 3:20]], -1) * 2, PAIR),
}


@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_cpp_computes_what_torch_does(name, tokens):
    found, expected = computed(*FUNCTIONS[name], tokens)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5), float((found - expected).abs().max())


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu, by the tangent": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": lambda x: torch.exp(x.abs() * -0.5),
    "sqrt": lambda x: torch.sqrt(x.abs()),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_activations_are_exact_to_rounding_far_from_zero_too(name, scale):
    found, expected = computed(ACTIVATIONS[name], WORD, 40, scale)
    assert torch.isfinite(found).all()
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6), float((found - expected).abs().max())


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.cumsum(-1), "computes cumsum.default, which kernels do not"),
        (lambda x: x.mean(1, keepdim=True) + x, "sums over more than a token's rows"),
        (lambda x: x**1.5, r"computes powers of 1.5"),
        (lambda x: x[:, 1:], "takes some of the tokens"),
        (lambda x: torch.cat([x, x], 1), "computes with numbers of tokens"),
        (lambda x: x.reshape(-1, 4), "computes with numbers of tokens"),
        (lambda x: x * x.to(torch.float64), "computes _to_copy.default"),
    ],
)
def test_what_is_not_done_token_by_token_is_refused(function, why):
    with pytest.raises(NotCaptured, match=why):
        program_of(graph_of(function, WORD), owned=0)


def test_room_is_used_again_but_never_while_it_is_needed():
    """A chain of stages: each array's room is free for others only before it is written and after it is last read."""
    from ragspec.engine.native.program import STORED, Array, Program
    from ragspec.engine.native.source import _places, _written

    arrays = [Array(STORED, at, 10 + at, level=level, last=last) for at, (level, last) in enumerate(LIVES)]
    places, scratch = _places(Program([], [], [], arrays, []))
    assert scratch < sum(array.size for array in arrays)
    for one in arrays:
        for other in arrays:
            together = _written(one) <= other.last and _written(other) <= one.last
            if one is not other and together:
                apart = places[one] + one.size <= places[other] or places[other] + other.size <= places[one]
                assert apart, (one, other)


LIVES = [(0, 0), (1, 1), (1, 1), (1, 2), (2, 2), (3, 3), (3, 5), (3, 3), (4, 4), (4, 4), (5, 5)]
