"""What makes the GPUs of tests/devices.py as asynchronous as real ones, on a machine without any.

    with several_gpus(queue=Queue()):
        one = torch.ones(2, device="cuda") + 1  # computed once something waits for it
        one.tolist()

Operators are queued, and computed once the host waits for them. Until then, what they write is NaN, or 0. A graph is
the operators that were queued while it was captured: replaying it runs no Python, and uses the memory that they used.
It refuses what CUDA refuses to capture. So code that reads a result before its event, writes to pinned memory that is
still to be copied, or captures a number that changes, computes something else than on the CPU.
"""

# ruff: noqa: SLF001 (of torch)

import contextlib
import random
import weakref
from collections import deque

import torch
from torch.utils._pytree import tree_map_only

from tests.devices import CPU, NotCaptured, Placed, held, tensors_in, without_gpus

COPY = torch.ops.aten.copy_
EMPTY = {torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided}


class Queue:
    """The work of a GPU: what it was given, and how much of it is done. seed: of how soon events find theirs done."""

    def __init__(self, seed=0):
        self.given = self.done = 0
        self.graph = None  # that is being captured
        self._work = deque()
        self._chance = random.Random(seed)
        self._pinned = weakref.WeakValueDictionary()

    def stand_ins(self):
        """Return what replaces parts of torch.cuda."""
        return {
            "Event": type("Event", (_Event,), {"queue": self}),
            "Stream": _Stream,
            "CUDAGraph": type("CUDAGraph", (_Graph,), {"queue": self}),
            "current_stream": _Stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "set_stream": lambda stream: None,
            "graph": lambda graph, *args, **kwargs: graph.captured(),
            "graph_pool_handle": lambda: None,
            "synchronize": lambda device=None: self.wait(),
        }

    def pin(self, tensor):
        """Note that a tensor on the host is in pinned memory."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor

    def add(self, work):
        """Have `work` done after what was given before."""
        self._work.append(work)
        self.given += 1

    def wait(self, until=None):
        """Do what was given, or the first `until` pieces of it."""
        if self.graph is not None:
            raise NotCaptured("operation not permitted when stream is capturing")
        with without_gpus():
            while self.done < (self.given if until is None else until):
                self._work.popleft()()
                self.done += 1

    def progress(self):
        """Do some of it."""
        self.wait(self._chance.randint(self.done, min(self.given, self.done + 100)))

    def launch(self, operator, args, kwargs, device):
        """Queue an operator; return its result, which is not there yet."""
        packet = getattr(operator, "overloadpacket", operator)
        schema = getattr(operator, "_schema", None)
        if packet is COPY:
            return self._copy(args[0], args[1], bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False)))
        args, kwargs = tree_map_only(torch.Tensor, self._taken, (args, kwargs))
        given = tensors_in((args, kwargs))
        inputs = [each for each in given if isinstance(each, Placed)]
        now, named = held(args), held(kwargs)
        if schema is not None and schema.is_mutable:
            self._add(lambda: operator(*now, **named), inputs)
            return kwargs.get("out", args[0])
        waits = device == CPU or _depends_on_numbers(operator, inputs)
        if waits:
            self.wait()
        with without_gpus():
            found = operator(*now, **named)
            hosts = {each.untyped_storage().data_ptr() for each in given if not isinstance(each, Placed)}
            found = tree_map_only(torch.Tensor, lambda each: each.clone() if _within(each, hosts) else each, found)
            if waits:
                return _placed(found, device, {})
            memories = {each.held.untyped_storage().data_ptr(): each.memory for each in inputs}
            fresh = [each for each in tensors_in(found) if not _within(each, memories)]
            for each in fresh:
                each.fill_(float("nan") if each.is_floating_point() else 0)

        known = set(memories)

        def compute():
            again = [each for each in tensors_in(operator(*now, **named)) if not _within(each, known)]
            for old, new in zip(fresh, again, strict=True):
                old.copy_(new)

        out = _placed(found, device, memories)
        if self.graph is not None:
            self.graph.own.update(each.memory for each in tensors_in(out) if not _within(each.held, known))
        if fresh and packet not in EMPTY:
            self._add(compute, inputs)
        return out

    def _add(self, work, inputs):
        """Have work on tensors done after what was given before, or in the graph that is being captured."""
        if self.graph is None:
            self.add(work)
        else:
            self.graph.add(work, inputs)

    def _copy(self, to, source, non_blocking):
        """Copy between devices, or on one."""
        inputs = [each for each in (to, source) if isinstance(each, Placed)]
        there, here = held((to, self._taken(source, non_blocking)))
        self._add(lambda: there.copy_(here), inputs)
        if to.device == CPU and not (non_blocking and self._is_pinned(to)):
            self.wait()
        return to

    def _taken(self, tensor, pinned=False):
        """Return a tensor as it is now, if it is the host's and not in pinned memory that is to be read later."""
        if tensor.device != CPU or (pinned and self._is_pinned(tensor)):
            return tensor
        if self.graph is not None and tensor.dim():
            raise NotCaptured("cannot copy unpinned memory during CUDA graph capture")
        with without_gpus():
            return tensor.clone()

    def _is_pinned(self, tensor):
        return tensor.untyped_storage().data_ptr() in self._pinned


def _depends_on_numbers(operator, inputs):
    """Return whether the host waits for an operator: it returns no tensor, or one with as many values as it finds."""
    if not isinstance(operator, torch._ops.OpOverload):  # a function that torch would call one from
        operator = getattr(getattr(torch.ops.aten, operator.__name__, None), "default", None)
    if operator is None:
        return False
    values = any(str(each.type) not in ("Tensor", "List[Tensor]") for each in operator._schema.returns)
    masked = operator.overloadpacket is torch.ops.aten.index and any(each.dtype == torch.bool for each in inputs[1:])
    return values or masked or torch.Tag.dynamic_output_shape in operator.tags


def _within(tensor, memories):
    return tensor.untyped_storage().data_ptr() in memories


def _placed(found, device, memories):
    def place(tensor):
        return Placed(tensor, device, memories.get(tensor.untyped_storage().data_ptr()))

    return found if device == CPU else tree_map_only(torch.Tensor, place, found)


class _Graph:
    """A CUDA graph: what was queued while it was captured."""

    def __init__(self):
        self.own = set()  # memory that it keeps
        self._work = []
        self._others = []  # other memory that it uses, and does not keep

    def add(self, work, inputs):
        """Add work on tensors."""
        self._work.append(work)
        self._others += [weakref.ref(each.memory) for each in inputs if each.memory not in self.own]

    @contextlib.contextmanager
    def captured(self):
        """Capture what is queued."""
        self.queue.graph = self
        try:
            yield
        finally:
            self.queue.graph = None

    def replay(self):
        """Queue it again."""
        assert all(memory() is not None for memory in self._others), "a graph uses memory that is free"
        for work in self._work:
            self.queue.add(work)


class _Stream:
    """A stream. All of them are one queue."""

    def wait_stream(self, other): ...


class _Event:
    """An event: what was given before it."""

    def __init__(self):
        self._at = 0

    def record(self):
        self._at = self.queue.given

    def synchronize(self):
        self.queue.wait(self._at)

    def query(self):
        self.queue.progress()
        return self.queue.done >= self._at
