"""The engine on a GPU that computes when the host waits for it, and captures graphs (tests/queued.py).

tests/gpu wants a real one. Attention is computed over gathered blocks, since FlexAttention is compiled for real GPUs.
"""

import pytest
import torch

from ragspec.engine.backends.paged_attention import gathered
from ragspec.engine.model import loaded
from tests.devices import NotCaptured, place, several_gpus
from tests.engine.test_devices import answers, engine
from tests.engine.test_engine_models import build
from tests.queued import Queue

CUDA = "cuda:0"


@pytest.fixture
def gpu(words):
    build("llama", words)  # transformers imports what asks torch.cuda
    with several_gpus(16 << 20, Queue()):
        yield


def graph_of(work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, work()


def test_what_was_given_is_computed_once_something_waits_for_it(gpu):
    source, read = torch.zeros(2, pin_memory=True), torch.zeros(2, pin_memory=True)
    one = torch.zeros(2, device=CUDA)
    one.copy_(source, non_blocking=True)
    source.fill_(3)
    pageable = torch.ones(2)
    two = one + pageable.to(CUDA)
    pageable.fill_(7)
    read.copy_(two, non_blocking=True)
    end = torch.cuda.Event()
    end.record()
    three = two * 2
    assert read.tolist() == [0, 0]
    end.synchronize()
    assert read.tolist() == [4, 4], "what was in pinned memory when it was copied, not before"
    assert three.held.isnan().all()
    assert three.tolist() == [8, 8]


def test_a_graph_repeats_its_operators_on_the_same_memory(gpu):
    numbers, factors = [torch.ones(3, device=CUDA)], [2]
    graph, found = graph_of(lambda: numbers[0].view(3, 1) * factors[0] + 1)
    assert torch.isnan(torch.tensor(found.tolist())).all(), "capturing computes nothing"
    factors[0] = 100
    numbers[0].fill_(5)
    graph.replay()
    assert found.tolist() == [[11], [11], [11]]
    numbers.clear()
    with pytest.raises(AssertionError, match="memory that is free"):
        graph.replay()


def test_a_graph_holds_no_waiting_and_no_copies_of_unpinned_memory(gpu):
    numbers = torch.ones(3, device=CUDA)
    for work in (numbers.tolist, numbers.nonzero, lambda: torch.ones(3).to(CUDA), numbers.cpu):
        with pytest.raises(NotCaptured):
            graph_of(work)


@pytest.fixture(scope="module")
def plain(words):
    return answers(engine(build("llama", words), words), words)


@pytest.mark.parametrize("method", ["none", "context", "draft_model"])
def test_answers_of_captured_steps_are_those_of_a_cpu(words, plain, gpu, method, monkeypatch):
    monkeypatch.setattr(loaded, "flex", lambda compiled, notes, exact: gathered)
    draft = place(build("llama", words), CUDA) if method == "draft_model" else None
    backend = engine(place(build("llama", words), CUDA), words, method, draft, compile="off")
    assert answers(backend, words) == plain
    assert backend.about()["captured_steps"] > 0
    assert not [note for note in backend.notes if note.startswith(("graphs", "attention"))]
