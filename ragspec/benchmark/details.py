"""What a report shows besides speeds: answers token by token, acceptance record by record, the machine's limits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from ragspec.benchmark.answers import Answer
from ragspec.benchmark.results import Piece, Quote, Roofline, Sample
from ragspec.records import Tokenizer

SHOWN = 6  # answers
PASSAGE = 1200  # characters of a passage that is shown
READ = 1 << 28  # bytes read to time memory
SIDE = 1024  # of the square matrices multiplied to time arithmetic
LEAST_S = 0.3  # seconds of trying: a busy machine is at its best for moments


def samples(answers: Sequence[Answer], tokenizer: Tokenizer) -> tuple[Sample, ...]:
    """Return the first of a pass's answers as pieces of text, each with where it came from."""
    return tuple(
        Sample(
            id=answer.id,
            question=answer.question,
            pieces=pieces(answer, tokenizer),
            passages=tuple(Quote(passage.id, passage.text[:PASSAGE]) for passage in answer.passages),
            guessed_known=bool(answer.guessed),
            speculation=answer.speculation,
        )
        for answer in answers[:SHOWN]
    )


def pieces(answer: Answer, tokenizer: Tokenizer) -> tuple[Piece, ...]:
    """Return an answer's tokens as text; a token that ends within a character has none."""
    ids = answer.token_ids
    sources: list[str | None] = [None] * len(ids)
    for start, end, passage in answer.copied_tokens:
        sources[start:end] = [passage] * (end - start)
    found, done = [], 0
    for i in range(len(ids)):
        text = tokenizer.decode(ids[: i + 1])
        if text.endswith("�") and i + 1 < len(ids):
            text = text[:done]  # a character that the next token completes
        drafted = bool(answer.guessed) and bool(answer.guessed[i])
        found.append(Piece(text[done:], "draft" if drafted else "target", sources[i]))
        done = max(done, len(text))
    return tuple(found)


def acceptance_by_record(answers: Sequence[Answer]) -> tuple[float, ...]:
    """Return the share of drafted tokens that was accepted, for every answer that had a draft."""
    rates = [answer.speculation["acceptance_rate"] for answer in answers]
    return tuple(rate for rate in rates if rate is not None)


@cache
def roofline(device: str, dtype: str) -> Roofline | None:
    """Return what this device reads and computes at best, measured once; None without torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    kind = getattr(torch, dtype, torch.float32)

    def best(work: Callable[[], Any]) -> float:
        least, began = float("inf"), time.perf_counter()
        while time.perf_counter() < began + LEAST_S:
            started = time.perf_counter()
            work().sum().item()  # waits for the device
            least = min(least, time.perf_counter() - started)
        return least

    block = torch.ones(READ // kind.itemsize, dtype=kind, device=device)
    square = torch.ones(SIDE, SIDE, dtype=kind, device=device)
    products: list[Callable[[], Any]] = [lambda: square @ square]
    if device == "cpu" and kind == torch.float32:
        from ragspec.engine.forms import makers  # torch's own product may be a fifth slower than oneDNN's

        products = [partial(make(square), square, None) for make in makers(None).values()]
    return Roofline(
        bytes_per_s=READ / min(best(lambda: block), best(lambda: block.view(-1, SIDE) @ square[0])),
        flops_per_s=2 * SIDE**3 / min(best(product) for product in products),
    )
