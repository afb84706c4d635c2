"""A generation -> its output line: the text, what it cost, where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ragspec.prompts.builder import Prompt
from ragspec.records import Generation, Passage, Record, Sampling, Tokenizer
from ragspec.runners.base import Runner


@dataclass(frozen=True, slots=True)
class Flight:
    """What is kept about a record while the runner has it."""

    record: Record
    prompt: Prompt
    sampling: Sampling
    fingerprint: str


def output_line(flight: Flight, outcome: Generation, runner: Runner, *, details: bool) -> dict[str, Any]:
    """Return the line that answers a record. details: with what an audit and a report need."""
    text = cut_at_stop(runner.tokenizer.decode(outcome.token_ids), flight.sampling.stop)
    first = outcome.time_to_first_token_s
    line: dict[str, Any] = {
        "id": flight.record.id,
        "output": text,
        "finish_reason": outcome.finish_reason,
        "prompt_tokens": len(flight.prompt.token_ids),
        "cached_prompt_tokens": outcome.cached_prompt_tokens,
        "output_tokens": len(outcome.token_ids),
        "time_to_first_token_s": None if first is None else round(first, 4),
        "latency_s": round(outcome.latency_s, 4),
        "speculation": outcome.spec.to_json(runner.method),
        "contexts": [passage.id for passage in flight.prompt.kept],
    }
    if any(passage.score is not None for passage in flight.prompt.kept):
        line["context_scores"] = [passage.score for passage in flight.prompt.kept]
    if runner.cites:
        line["copied"] = copied_spans(runner.tokenizer, flight.prompt.kept, outcome, text)
    if flight.prompt.dropped:
        line["dropped_contexts"] = [passage.id for passage in flight.prompt.dropped]
    if details:
        line |= token_details(flight, outcome)
    return line | {"metadata": flight.record.metadata, "fingerprint": flight.fingerprint}


def token_details(flight: Flight, outcome: Generation) -> dict[str, Any]:
    """Return what an audit and a report need besides the answer: its tokens, where each came from, and its prompt."""
    kept = flight.prompt.kept
    return {
        "token_ids": outcome.token_ids,
        "guessed": list(outcome.guessed),
        "copied_tokens": [[run.start, run.end, kept[run.passage].id] for run in outcome.copied],
        "prompt_token_ids": flight.prompt.token_ids,
        "sampling": asdict(flight.sampling),
        "question": flight.record.query,
        "passages": [{"id": passage.id, "text": passage.text} for passage in kept],
    }


def copied_spans(
    tokenizer: Tokenizer, passages: Sequence[Passage], outcome: Generation, text: str
) -> list[dict[str, Any]]:
    """Return which characters of an answer appear word for word in which passage, as its drafts found them there."""
    spans = []
    for run in outcome.copied:
        start = len(tokenizer.decode(outcome.token_ids[: run.start]))
        end = min(len(text), len(tokenizer.decode(outcome.token_ids[: run.end])))
        quoted = text[start:end]
        start, quoted = start + len(quoted) - len(quoted.lstrip()), quoted.strip()
        if quoted and quoted in passages[run.passage].text:  # half a character at an edge does not count
            spans.append({"start": start, "end": start + len(quoted), "context": passages[run.passage].id})
    return spans


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """Return `text` up to the first stop string in it, that string left out."""
    places = [at for at in (text.find(word) for word in stop) if at >= 0]
    return text[: min(places)] if places else text
