"""What a report shows beside speeds: answers token by token, acceptance record by record, the machine's limits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ragspec.records import Tokenizer

SHOWN = 6  # answers
PASSAGE = 1200  # characters of a passage that is shown
READ = 1 << 28  # bytes read to time memory
SIDE = 1024  # of the square matrices multiplied to time arithmetic
TRIES = 5


def samples(answers: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the first of a pass's answers as pieces of text, each with where it came from."""
    return [
        {
            "id": record["id"],
            "question": record["question"],
            "pieces": pieces(record, tokenizer),
            "passages": [{"id": passage["id"], "text": passage["text"][:PASSAGE]} for passage in record["passages"]],
            "guessed_known": bool(record["guessed"]),
            "speculation": record["speculation"],
        }
        for record in answers[:SHOWN]
    ]


def pieces(record: dict[str, Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return [{text, by: target | draft, context: id or None}] per token; a token of half a character has no text."""
    ids, guessed = record["token_ids"], record["guessed"]
    sources: list[str | None] = [None] * len(ids)
    for start, end, passage in record["copied_tokens"]:
        sources[start:end] = [passage] * (end - start)
    found, done = [], 0
    for i in range(len(ids)):
        text = tokenizer.decode(ids[: i + 1])
        if text.endswith("�") and i + 1 < len(ids):
            text = text[:done]  # a character that the next token completes
        by = "draft" if guessed and guessed[i] else "target"
        found.append({"text": text[done:], "by": by, "context": sources[i]})
        done = max(done, len(text))
    return found


def acceptance_by_record(answers: Sequence[dict[str, Any]]) -> list[float]:
    """Return the share of drafted tokens that was accepted, for every answer that had a draft."""
    rates = [record["speculation"]["acceptance_rate"] for record in answers]
    return [rate for rate in rates if rate is not None]


def roofline(device: str, dtype: str) -> dict[str, float] | None:
    """Return what this device reads and computes at most: bytes and floating-point operations per second."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    kind = getattr(torch, dtype, torch.float32)

    def best(work: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(TRIES):
            started = time.perf_counter()
            work().sum().item()  # waits for the device
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    block = torch.ones(READ // kind.itemsize, dtype=kind, device=device)
    square = torch.ones(SIDE, SIDE, dtype=kind, device=device)
    return {
        "bytes_per_s": READ / best(lambda: block),
        "flops_per_s": 2 * SIDE**3 / best(lambda: square @ square),
    }
