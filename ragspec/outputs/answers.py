"""Answers as output lines in ragspec's own form (docs/guide/output.md), with texts, costs, copied spans and logprobs.

Logprobs have the forms of OpenAI's API reference, as in vLLM 0.32. Logarithms are natural, of the model's unmodified
distribution.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any, Protocol

from ragspec.json_text import JSONDecodeError, dumps, loads
from ragspec.models.stopping import find_stop, split_reasoning
from ragspec.prompts.builder import Prompt
from ragspec.records import Copied, Generation, Passage, Record, Sampling, Tokenizer
from ragspec.runners.base import Runner
from ragspec.stats import SpecStats
from ragspec.structured.form import Form, after_thinking
from ragspec.structured.grammars import is_complete, spaced

REQUEST_BYTES = 8  # of each part of a request's digest
LEAST = -9999.0  # logprob of an impossible token; JSON has no infinity


def to_logprobs(answer: Generation, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the `content` of a chat completion's logprobs: one object per token."""
    tokens = zip(answer.token_ids, answer.logprobs, strict=True)
    return [
        _token(token, found.logprob, tokenizer)
        | {"top_logprobs": [_token(other, logprob, tokenizer) for other, logprob in found.likeliest]}
        for token, found in tokens
    ]


def to_completion_logprobs(answer: Generation, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the logprobs of a text completion: lists with one item per token."""
    pieces = [tokenizer.piece(token) for token in answer.token_ids]
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    return {
        "text_offset": ends[:-1],
        "token_logprobs": [_finite(found.logprob) for found in answer.logprobs],
        "tokens": pieces,
        "top_logprobs": [
            {tokenizer.piece(other): _finite(logprob) for other, logprob in found.likeliest}
            for found in answer.logprobs
        ],
    }


def _token(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    piece, written = tokenizer.piece(token), tokenizer.piece_bytes(token)
    return {"token": piece, "logprob": _finite(logprob), "bytes": list(written)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


# -- lines -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordInFlight:
    """A record that the runner is working on. index: of its output line. prompts: usually one.

    n: answers per prompt. form: their required form, None for free text; grammar: the form compiled for this record.
    """

    index: int
    record: Record
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    n: int
    fingerprint: str
    form: Form | None = None
    grammar: str = ""

    @property
    def prompt(self) -> Prompt:
        """Return the first prompt; a record with passages has no others."""
        return self.prompts[0]

    def whole_grammar(self, prompt: Prompt) -> str:
        """Return the grammar of a prompt's answer, including the reasoning that may precede it."""
        thinking = prompt.thinking
        return after_thinking(self.grammar, thinking) if self.grammar and thinking is not None else self.grammar

    @property
    def prompt_tokens(self) -> int:
        """Return the number of tokens in all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def request(self) -> str:
        """Return a digest of what the model is asked, PROMPTS-SAMPLING: an equal one has an equal answer.

        What does not matter to a greedy answer is left out; a sampled one depends on the record's id.
        """
        sampling: tuple[Any, ...] = (self.sampling, self.record.id)
        if self.sampling.temperature == 0:
            sampling = (replace(self.sampling, top_p=1.0, top_k=0, min_p=0.0, seed=0),)
        prompts = b"".join(array("q", [len(each.token_ids), *each.token_ids]).tobytes() for each in self.prompts)
        asked = repr((*sampling, self.n, self.grammar)).encode()
        return "-".join(blake2b(part, digest_size=REQUEST_BYTES).hexdigest() for part in (prompts, asked))


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """An answer as far as it is written. copied: spans of `text` copied from a passage, as in an output line."""

    id: str
    text: str
    reasoning: str = ""
    copied: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class FailedRecord:
    """A record without an answer. name: its id or a substitute. line: of the input, if the line is invalid.

    request: the digest of what the model was asked, "" if it was not. config: of the config, as in run.json.
    """

    name: str
    fingerprint: str
    kind: str
    message: str
    line: int | None = None
    request: str = ""
    config: str = ""


class LineFormat(Protocol):
    """A form of output lines."""

    def answer(
        self, flight: RecordInFlight, answers: Sequence[Generation], runner: Runner, *, details: bool
    ) -> dict[str, Any]:
        """Return the line of an answered record. answers: `n` per prompt. details: add data for audit and report."""

    def error(self, failed: FailedRecord) -> dict[str, Any]:
        """Return the line of a record without an answer."""

    def signed(self, line: bytes, config: str) -> bytes:
        """Return an answer's line with the digest of the config that wrote it, as in run.json."""


class NativeFormat:
    """ragspec's own form: docs/guide/output.md. include: `output.include`."""

    def __init__(self, include: Sequence[str] = ()) -> None:
        self._include = include

    def answer(
        self, flight: RecordInFlight, answers: Sequence[Generation], runner: Runner, *, details: bool
    ) -> dict[str, Any]:
        first, kept = answers[0], flight.prompt.kept
        parts = answer_texts(flight, answers, runner.tokenizer)
        line: dict[str, Any] = {"id": flight.record.id}
        if "query" in self._include:
            line["query"] = flight.record.query
        line |= {"output": parts[0].shown} | _reasoning(flight, parts)
        line["finish_reason"] = first.finish_reason
        if len(answers) > 1:
            line["outputs"] = [part.shown for part in parts]
            line["finish_reasons"] = [each.finish_reason for each in answers]
        if flight.form is not None:
            line |= _structured(flight, flight.form, answers, [part.text for part in parts])
        line |= _costs(flight, answers, runner)
        line |= _passages(flight, self._include)
        if runner.cites:
            line["copied"] = copied_spans(runner.tokenizer, kept, first, parts[0])
        if flight.prompt.dropped:
            line["dropped_contexts"] = [passage.id for passage in flight.prompt.dropped]
        if flight.sampling.logprobs is not None:
            found = [to_logprobs(each, runner.tokenizer) for each in answers]
            line["logprobs"] = found if len(answers) > 1 else found[0]
        if details:
            line |= token_details(flight, answers)
        return line | {
            "metadata": flight.record.metadata,
            "fingerprint": flight.fingerprint,
            "request": flight.request,
        }

    def error(self, failed: FailedRecord) -> dict[str, Any]:
        place = {} if failed.line is None else {"line": failed.line}
        error = {"type": failed.kind, "message": failed.message}
        by = {name: value for name, value in (("request", failed.request), ("config", failed.config)) if value}
        return {"id": failed.name, **place, "error": error, "fingerprint": failed.fingerprint, **by}

    def signed(self, line: bytes, config: str) -> bytes:
        return dumps({**loads(line), "config": config})


def record_fields(flight: RecordInFlight, include: Sequence[str]) -> dict[str, Any]:
    """Return the fields of an answer's line that do not depend on the answer. include: `output.include`."""
    dropped = [passage.id for passage in flight.prompt.dropped]
    return {
        "query": flight.record.query,
        **_passages(flight, include),
        **({"dropped_contexts": dropped} if dropped else {}),
        "metadata": flight.record.metadata,
    }


def _passages(flight: RecordInFlight, include: Sequence[str]) -> dict[str, Any]:
    kept = flight.prompt.kept
    found: dict[str, Any] = {"contexts": [passage.id for passage in kept]}
    if any(passage.score is not None for passage in kept):
        found["context_scores"] = [passage.score for passage in kept]
    if "contexts" in include:
        found["passages"] = [passage_fields(passage) for passage in kept]
    return found


def passage_fields(passage: Passage) -> dict[str, Any]:
    """Return a passage as an output line has it."""
    fields = {"id": passage.id, "title": passage.title, "text": passage.text, "score": passage.score}
    return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class AnswerText:
    """One answer's text. reasoning: the text of the model's reasoning. start: its number of tokens.

    before: the prompt, if the record asks for an echo.
    """

    text: str
    reasoning: str = ""
    start: int = 0
    before: str = ""

    @property
    def shown(self) -> str:
        """Return the text that is written."""
        return self.before + self.text


def answer_texts(flight: RecordInFlight, answers: Sequence[Generation], tokenizer: Tokenizer) -> list[AnswerText]:
    """Return the texts of answers, which are `n` per prompt, or some answers to the first prompt."""
    return [_part(flight, answer, at // flight.n, tokenizer) for at, answer in enumerate(answers)]


def _part(flight: RecordInFlight, answer: Generation, prompt: int, tokenizer: Tokenizer) -> AnswerText:
    sampling, ended = flight.sampling, answer.finish_reason == "stop"
    ids = _without_end(flight, answer.token_ids, tokenizer) if ended else answer.token_ids
    reasoning, text, start = split_reasoning(flight.prompts[prompt].thinking, ids, tokenizer, ended=ended)
    least = 0  # characters exempt from stop strings; the text has no blanks after reasoning
    if sampling.stop and sampling.min_new_tokens > start:
        exempt = tokenizer.decode(ids[start : sampling.min_new_tokens])
        least = len(exempt.lstrip() if start else exempt)
    end = find_stop(text, sampling.stop, least)
    return AnswerText(text[:end], reasoning, start, _echo(flight, prompt, tokenizer) if flight.record.echo else "")


def _without_end(flight: RecordInFlight, token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return an answer's tokens without an end token at its end."""
    ends = flight.sampling.ends(tokenizer.ends)
    return list(token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids)


def _echo(flight: RecordInFlight, prompt: int, tokenizer: Tokenizer) -> str:
    """Return what an echo begins with: a completion's prompt, or the message that a chat continues."""
    record = flight.record
    if record.messages is not None:
        continued = record.template_args.get("continue_final_message")
        return str(record.messages[-1]["content"]) if continued else ""
    given = record.prompts[prompt] if record.prompts else record.prompt
    return given if isinstance(given, str) else tokenizer.decode(flight.prompts[prompt].token_ids)


def _reasoning(flight: RecordInFlight, parts: Sequence[AnswerText]) -> dict[str, Any]:
    """Return the fields about reasoning, {} without any."""
    if not flight.record.reasoning or not any(part.start for part in parts):
        return {}
    found: dict[str, Any] = {"reasoning": parts[0].reasoning}
    if len(parts) > 1:
        found["reasonings"] = [part.reasoning for part in parts]
    return found | {"reasoning_tokens": sum(part.start for part in parts)}


def _structured(
    flight: RecordInFlight, form: Form, answers: Sequence[Generation], texts: Sequence[str]
) -> dict[str, Any]:
    """Return whether all answers match the form, and their parsed values if it is JSON."""
    valid = [is_valid(flight, form, answer, text) for answer, text in zip(answers, texts, strict=True)]
    found: dict[str, Any] = {"valid": all(valid)}
    if form.is_json:
        parsed = [loads(text) if good else None for text, good in zip(texts, valid, strict=True)]
        found["parsed"] = parsed if len(parsed) > 1 else parsed[0]
    return found


def is_valid(flight: RecordInFlight, form: Form, answer: Generation, text: str) -> bool:
    """Return whether an answer matches its form. One that was cut off does if nothing is missing."""
    sampling = flight.sampling  # whose stop strings and tokens may cut anywhere
    cut = bool(sampling.stop) or any(token in sampling.stop_token_ids for token in answer.token_ids[-1:])
    ended = answer.finish_reason == "stop" and not cut
    if not form.is_json:
        return ended or is_complete(flight.grammar, text)
    try:
        value = loads(text)
    except JSONDecodeError:
        return False
    return ended or is_complete(flight.grammar, text) or is_complete(flight.grammar, spaced(value))


def _costs(flight: RecordInFlight, answers: Sequence[Generation], runner: Runner) -> dict[str, Any]:
    firsts = [each.time_to_first_token_s for each in answers if each.time_to_first_token_s is not None]
    written = distinct_answers(answers)
    spec = SpecStats()
    for each in written:
        spec.add(each.spec)
    undrafted = next((each.undrafted for each in written if each.undrafted), "")
    return {
        "prompt_tokens": flight.prompt_tokens,
        "cached_prompt_tokens": cached_tokens(flight, answers),
        "output_tokens": sum(len(each.token_ids) for each in answers),
        "time_to_first_token_s": round(min(firsts), 4) if firsts else None,
        "latency_s": round(max(each.latency_s for each in answers), 4),
        "speculation": spec.to_json(runner.method) | ({"off": undrafted} if undrafted else {}),
    }


def cached_tokens(flight: RecordInFlight, answers: Sequence[Generation]) -> int:
    """Return how many prompt tokens came from the cache, counting the first answer to each prompt only."""
    return sum(each.cached_prompt_tokens for each in answers[:: flight.n])


def distinct_answers(answers: Sequence[Generation]) -> list[Generation]:
    """Return the answers without repetitions: greedy answers to one prompt are the same object."""
    return list({id(each): each for each in answers}.values())


def partial_answer(
    flight: RecordInFlight, token_ids: Sequence[int], copied: Sequence[Copied], tokenizer: Tokenizer
) -> PartialAnswer:
    """Return a record's answer as far as `token_ids` go, without half a character or stop string at its end."""
    token_ids = _without_end(flight, token_ids, tokenizer)  # whether the answer ends there is not known yet
    whole = [run for run in copied if run.start < len(token_ids)]
    so_far = Generation(0, token_ids, "length", SpecStats(), 0.0, copied=tuple(whole))
    part = answer_texts(flight, [so_far], tokenizer)[0]
    part = replace(part, text=_settled(part.text, flight.sampling.stop))
    spans = copied_spans(tokenizer, flight.prompt.kept, so_far, part)
    return PartialAnswer(flight.record.id, part.text, part.reasoning, tuple(spans))


def _settled(text: str, stop: Sequence[str]) -> str:
    """Return a growing text without what may yet become another character, or a stop string."""
    text = text.rstrip("\ufffd")
    begun = (size for word in stop for size in range(1, len(word)) if text.endswith(word[:size]))
    return text[: len(text) - max(begun, default=0)]


def token_details(flight: RecordInFlight, answers: Sequence[Generation]) -> dict[str, Any]:
    """Return what audit and report need besides the answer: tokens, their origins, prompt, sampling and passages.

    All this is of the first answer; `others` has what the audit needs of the others, named as their requests were.
    """
    kept, (outcome, *others) = flight.prompt.kept, distinct_answers(answers)
    details = {
        "token_ids": outcome.token_ids,
        "guessed": list(outcome.guessed),
        "copied_tokens": [[run.start, run.end, kept[run.passage].id] for run in outcome.copied],
        "prompt_token_ids": flight.prompt.token_ids,
        "sampling": asdict(flight.sampling),
        "grammar": flight.whole_grammar(flight.prompt),
        "token_logprobs": [found.logprob for found in outcome.logprobs],
        "question": flight.record.query,
        "passages": [{"id": passage.id, "text": passage.text} for passage in kept],
    }
    if others:
        per_prompt = 1 if flight.sampling.temperature == 0 else flight.n
        details["others"] = [
            {
                "id": f"{flight.record.id}#{position}",
                "token_ids": other.token_ids,
                "prompt_token_ids": flight.prompts[position // per_prompt].token_ids,
                "sampling": details["sampling"],
                "grammar": flight.whole_grammar(flight.prompts[position // per_prompt]),
                "token_logprobs": [found.logprob for found in other.logprobs],
            }
            for position, other in enumerate(others, 1)
        ]
    return details


def copied_spans(
    tokenizer: Tokenizer, passages: Sequence[Passage], outcome: Generation, part: AnswerText
) -> list[dict[str, Any]]:
    """Return the spans of an answer that its drafts copied from a passage and that appear in it word for word."""
    spans = []
    text, own = part.text, outcome.token_ids[part.start :]
    whole = tokenizer.decode(own)
    blanks = len(whole) - len(whole.lstrip()) if part.start else 0  # between reasoning and answer
    for run in outcome.copied:
        start, end = (max(0, place - part.start) for place in (run.start, run.end))
        start = max(0, len(tokenizer.decode(own[:start])) - blanks)
        end = min(len(text), max(0, len(tokenizer.decode(own[:end])) - blanks))
        quoted = text[start:end]
        start, quoted = start + len(quoted) - len(quoted.lstrip()), quoted.strip()
        if quoted and quoted in passages[run.passage].text:  # a partial character at an edge does not match
            spans.append({"start": start, "end": start + len(quoted), "context": passages[run.passage].id})
    return spans
