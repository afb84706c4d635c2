"""A line of OpenAI's Batch API -> Record: {"custom_id", "method", "url", "body": {"messages" | "prompt", ...}}.

Bodies of /v1/chat/completions and /v1/completions, whose prompt is continued as it is. A field that would change the
answer in a way that cannot be done is the record's error; one with a value that means nothing (null, false, 0, "", [],
{}) is not.
Source: OpenAI's API reference; vLLM 0.32, entrypoints/openai.
"""

from __future__ import annotations

from typing import Any

from ragspec.errors import RecordError
from ragspec.inputs.messages import messages_of
from ragspec.inputs.structured import structured_of
from ragspec.inputs.values import kind, names, record_id, text_of
from ragspec.records import Record

ENVELOPE = {"custom_id", "body", "method", "url"}
URLS = ("/v1/chat/completions", "/v1/completions")
# what a body may ask for -> our sampling key
SAMPLING = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "seed": "seed",
    "n": "n",
}
# read elsewhere, or about the service and not the answer
READ = {
    "model", "messages", "prompt", "logprobs", "top_logprobs", "metadata", "user", "store", "service_tier",
    "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "stream_options",
    "parallel_tool_calls", "priority", "request_id", "session_id", "response_format", "structured_outputs",
}  # fmt: skip
# values that mean nothing, of fields that mean something
NEUTRAL = {
    "best_of": (1,),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "include_reasoning": (True,),
    "length_penalty": (1, 1.0),
    "top_k": (-1,),
}
SIGNED = 1 << 63  # a seed may be any 64-bit number there; ours are not negative


def parse_batch_line(value: dict[str, Any]) -> Record:
    """Return the Record that a line means. Raises RecordError."""
    body = value.get("body")
    if not isinstance(body, dict):
        raise RecordError(f'"body" must be an object with "messages" or "prompt", got {kind(body)}')
    if value.get("custom_id") is None:
        raise RecordError('"custom_id" is missing; a line with "body" needs one')
    if value.get("url") is not None and value["url"] not in URLS:
        raise RecordError(f'"url": {value["url"]!r} is not supported; known: {", ".join(URLS)}')
    given = {key: field for key, field in body.items() if not _means_nothing(key, field)}
    if given.get("best_of") == body.get("n"):
        given.pop("best_of", None)
    structured = structured_of({key: field for key, field in given.items() if key != "structured"}, "body.")
    if unknown := sorted(given.keys() - SAMPLING.keys() - READ):
        raise RecordError(f'"body.{unknown[0]}" is not supported; known: {", ".join(sorted({*SAMPLING, *READ}))}')
    chat = body.get("messages") is not None
    metadata = {key: field for key, field in value.items() if key not in ENVELOPE}
    if isinstance(body.get("metadata"), dict):
        metadata |= body["metadata"]
    prompts = () if chat else _prompts(body)
    return Record(
        id=record_id(value["custom_id"], 0),
        messages=messages_of(body["messages"]) if chat else None,
        prompt=prompts[0] if prompts else None,
        prompts=prompts if len(prompts) > 1 else (),
        sampling=_sampling(given, chat),
        metadata=metadata,
        raw=not chat,
        structured=structured,
        model=body["model"] if isinstance(body.get("model"), str) else None,
    )


def _means_nothing(key: str, field: Any) -> bool:
    if key in NEUTRAL and any(field == neutral and type(field) is type(neutral) for neutral in NEUTRAL[key]):
        return True
    if field is None:
        return True
    # a temperature of 0 is greedy, a seed of 0 a seed
    return key not in SAMPLING and key not in READ and field in (False, "", [], {})


def _sampling(given: dict[str, Any], chat: bool) -> dict[str, Any]:
    sampling = {SAMPLING[key]: field for key, field in given.items() if key in SAMPLING}
    if isinstance(seed := sampling.get("seed"), int):
        sampling["seed"] = seed % SIGNED
    if (told := _logprobs(given, chat)) is not None:
        sampling["logprobs"] = told
    return sampling


def _logprobs(given: dict[str, Any], chat: bool) -> int | None:
    """Return how many likeliest tokens are asked for; None if no logprobs are."""
    asked, most = given.get("logprobs"), given.get("top_logprobs") or 0
    if not chat:
        if asked is False:
            return None
        if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int)):
            raise RecordError(f'"body.logprobs" must be a whole number, got {kind(asked)}')
        return asked
    if asked not in (None, True, False):
        raise RecordError(f'"body.logprobs" must be true or false, got {kind(asked)}')
    if most and not asked:
        raise RecordError('"body.top_logprobs" needs "logprobs": true')
    if not isinstance(most, int):
        raise RecordError(f'"body.top_logprobs" must be a whole number, got {kind(most)}')
    return most if asked else None


def _prompts(body: dict[str, Any]) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts of a completion: a text, a list of texts, token ids, or a list of lists of token ids."""
    given = body.get("prompt")
    if given is None:
        raise RecordError(f'no prompt: "body" needs "messages" or "prompt", it has {names(body)}')
    several = isinstance(given, list) and given and not _are_tokens(given)
    return tuple(_prompt(each) for each in (given if several else [given]))


def _prompt(given: Any) -> str | tuple[int, ...]:
    return tuple(given) if _are_tokens(given) else text_of(given, "body.prompt")


def _are_tokens(given: Any) -> bool:
    return (
        isinstance(given, list)
        and bool(given)
        and all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in given)
    )
