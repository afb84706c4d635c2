"""Output lines of OpenAI's Batch API: {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}.

The id contains the fingerprint, so that a resumed run knows the finished rows. Source: OpenAI's API reference.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ragspec.config.run import RunConfig
from ragspec.json_text import dumps, loads
from ragspec.outputs.answers import (
    AnswerText,
    FailedRecord,
    LineFormat,
    NativeFormat,
    RecordInFlight,
    answer_texts,
    cached_tokens,
    to_completion_logprobs,
    to_logprobs,
)
from ragspec.outputs.ledger import LINE
from ragspec.records import Generation
from ragspec.runners.base import Runner

BAD_REQUEST, SERVER_ERROR = 400, 500


class OpenAIBatch:
    """Chat completions, or text completions for records with a prompt. model: the model name in the lines."""

    def __init__(self, model: str) -> None:
        self._model = model

    def answer(
        self, flight: RecordInFlight, answers: Sequence[Generation], runner: Runner, *, details: bool
    ) -> dict[str, Any]:
        chat = flight.record.prompt is None
        parts = answer_texts(flight, answers, runner.tokenizer)
        choice = _chat_choice if chat else _text_choice
        choices = []
        for index, (answer, part) in enumerate(zip(answers, parts, strict=True)):
            logprobs = flight.sampling.logprobs is not None
            content = choice(answer, part if flight.record.reasoning else replace(part, reasoning=""), runner, logprobs)
            choices.append({"index": index, **content, "finish_reason": answer.finish_reason})
        written = sum(len(answer.token_ids) for answer in answers)
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{flight.fingerprint}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": choices,
            "usage": {
                "prompt_tokens": flight.prompt_tokens,
                "completion_tokens": written,
                "total_tokens": flight.prompt_tokens + written,
                "prompt_tokens_details": {"cached_tokens": cached_tokens(flight, answers)},
                "completion_tokens_details": {"reasoning_tokens": sum(part.start for part in parts)},
            },
        }
        return _line(flight.record.id, flight.fingerprint, 200, body, None)

    def error(self, failed: FailedRecord) -> dict[str, Any]:
        status = BAD_REQUEST if failed.kind == "RecordError" else SERVER_ERROR
        code = "invalid_request" if status == BAD_REQUEST else "server_error"
        body = {"error": {"message": failed.message, "type": f"{code}_error", "param": None, "code": failed.kind}}
        return _line(failed.name, failed.fingerprint, status, body, {"code": code, "message": failed.message})

    def signed(self, line: bytes, config: str) -> bytes:
        value = loads(line)
        value["response"]["body"]["system_fingerprint"] = config  # OpenAI's name for the backend configuration
        return dumps(value)


def _line(
    name: str, fingerprint: str, status: int, body: dict[str, Any], error: dict[str, Any] | None
) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{fingerprint}", "body": body}
    return {"id": f"{LINE}{fingerprint}", "custom_id": name, "response": response, "error": error}


def _chat_choice(answer: Generation, part: AnswerText, runner: Runner, logprobs: bool) -> dict[str, Any]:
    reasoning = {"reasoning": part.reasoning} if part.reasoning else {}
    return {
        "message": {"role": "assistant", "content": part.shown, **reasoning, "refusal": None},
        "logprobs": {"content": to_logprobs(answer, runner.tokenizer), "refusal": None} if logprobs else None,
    }


def _text_choice(answer: Generation, part: AnswerText, runner: Runner, logprobs: bool) -> dict[str, Any]:
    return {"text": part.shown, "logprobs": to_completion_logprobs(answer, runner.tokenizer) if logprobs else None}


def line_format_of(config: RunConfig) -> LineFormat:
    """Return the line format of a run's `output.format`."""
    if config.output.format == "openai":
        return OpenAIBatch(config.output.model or config.model or config.runner)
    return NativeFormat(config.output.include)
