"""Several GPUs on a machine without any: tensors that name a GPU, hold their numbers on the CPU, and refuse to meet.

    with several_gpus():
        a, b = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
        a + b  # DevicesDiffer
        a + b.to("cuda:0")

FakeTensorMode refuses the same, but its tensors hold no numbers, so no answers could be compared. With a queue
(tests/queued.py), they are as asynchronous as real ones, and capture graphs.
"""

# ruff: noqa: SLF001 (of torch)

import contextlib
from unittest import mock

import accelerate
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

CPU = torch.device("cpu")
MOVES = torch.ops.aten.to, torch.ops.aten._to_copy, torch.ops.aten.copy_  # which may go from one device to another
READ = {getattr(torch.Tensor, name) for name in ("tolist", "item", "__float__", "__int__", "__bool__", "__index__")}
INDEXES = (
    torch.ops.aten.index,
    torch.ops.aten.index_put_,
    torch.Tensor.__getitem__,
    torch.Tensor.__setitem__,
)  # which take indices on the CPU too


class DevicesDiffer(RuntimeError):
    """An operator was given tensors of several devices."""


class NotCaptured(RuntimeError):
    """Something was done that a graph cannot hold."""


class Memory:
    """What a tensor is in."""


class Placed(torch.Tensor):
    """A tensor on a GPU that is not there."""

    held: torch.Tensor
    memory: object  # the same for all tensors with this memory; gone when it is free

    @staticmethod
    def __new__(cls, held, device, memory=None):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        self = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=device, **layout)
        self.held = held
        self.memory = memory or Memory()
        return self

    def __repr__(self):
        return f"{self.held} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return _computed(operator, args, kwargs or {})


def _met(operator, given):
    """Return the device of tensors; a single number on the CPU may meet any."""
    found = {each.device for each in given if each.dim() or each.device != CPU}
    if len(found) > 1:
        raise DevicesDiffer(f"{operator}: {', '.join(sorted(map(str, found)))}")
    return next(iter(found), CPU)


def held(given):
    """Return arguments with tensors on the CPU for those on a GPU."""
    on_cpu = tree_map_only(torch.device, lambda each: CPU, given)
    return tree_map_only(Placed, lambda each: each.held, on_cpu)


def tensors_in(given):
    """Return the tensors among arguments or results."""
    return [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]


def placed(given, device):
    """Return results as they are on a device."""
    return given if device == CPU else tree_map_only(torch.Tensor, lambda each: Placed(each, device), given)


@contextlib.contextmanager
def without_gpus():
    """Compute on the CPU what is given there, as if there were no GPUs."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


_queue = None  # of several_gpus


def _computed(operator, args, kwargs):
    leaves = tree_leaves((args, kwargs))
    given = tensors_in(leaves)
    device = next((each for each in leaves if isinstance(each, torch.device)), None)
    if operator.overloadpacket in MOVES:
        met = given[0].device
    else:
        met = _met(operator, [e for e in given if e.device != CPU] if operator.overloadpacket in INDEXES else given)
    device, plain = device or met, {key: each for key, each in kwargs.items() if key != "pin_memory"}
    if _queue is not None:
        if device != CPU or any(each.device != CPU for each in given):
            return _queue.launch(operator, args, plain, device)
        out = operator(*args, **plain)
        if kwargs.get("pin_memory"):
            _queue.pin(out)
        return out
    out = operator(*held(args), **held(plain))
    if operator._schema.is_mutable:
        return kwargs.get("out", args[0])
    return placed(out, device)


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return _computed(operator, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What torch does before it comes to an operator, and would ask the GPU for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if function is torch.Tensor.copy_:
            return _computed(torch.ops.aten.copy_.default, args, kwargs)
        if function in READ and isinstance(args[0], Placed):
            if _queue is not None:
                _queue.wait()
            return function(args[0].held)
        try:
            return function(*args, **kwargs)
        except (DevicesDiffer, NotCaptured):
            raise
        except RuntimeError:  # there is no such GPU, so that torch cannot make it the current one
            pass
        given = tensors_in((args, kwargs))
        device = _met(function, [e for e in given if e.device != CPU] if function in INDEXES else given)
        if _queue is not None:
            return _queue.launch(function, args, kwargs, device)
        return placed(function(*held(args), **kwargs), device)


def at_once(function):
    """Return a function of tensors that is like one operator, to which all of them are given on one device."""

    def called(*args, **kwargs):
        device = _met(function, tensors_in((args, kwargs)))
        with without_gpus():
            return placed(function(*held(args), **kwargs), device)

    return called


class _Event:
    """A CUDA event of work that is done at once."""

    def record(self): ...

    def synchronize(self): ...

    def query(self):
        return True


@contextlib.contextmanager
def several_gpus(free=1 << 30, queue=None):
    """Have GPUs: any number of them. free: bytes on each. queue: what makes them asynchronous (tests/queued.py)."""
    global _queue
    stand_ins = {
        "_lazy_init": lambda: None,
        "Event": _Event,
        "set_device": lambda device: None,
        "synchronize": lambda device: None,
        "mem_get_info": lambda device: (free, free),
        "get_device_name": str,
        **(queue.stand_ins() if queue else {}),
    }
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(_Operators())
        stack.enter_context(_Functions())
        _queue = queue
        try:
            yield
        finally:
            _queue = None


def place(module, device):
    """Put a module on a GPU."""
    for each in module.modules():
        for key, held in each._parameters.items():
            if held is not None:
                each._parameters[key] = torch.nn.Parameter(Placed(held.data, device), requires_grad=False)
        for key, held in each._buffers.items():
            each._buffers[key] = Placed(held, device)
    return module


def spread_over(model, devices, output=None):
    """Put the layers of a model like Llama on so many GPUs, with the hooks of accelerate that its device_map brings.

    output: the device of the output layer, if it is not the last, as where it is that of the embedding.
    """
    depth, last = len(model.model.layers), f"cuda:{devices - 1}"
    places = {f"model.layers.{i}": f"cuda:{i * devices // depth}" for i in range(depth)}
    places |= {"model.embed_tokens": "cuda:0", "model.norm": last, "model.rotary_emb": last, "lm_head": output or last}
    for name, device in places.items():
        place(model.get_submodule(name), device)
    return accelerate.dispatch_model(model, places, skip_keys=model._skip_keys_device_placement)
