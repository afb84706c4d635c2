"""Lines of OpenAI's Batch API as records: {"custom_id", "method", "url", "body": {"messages" | "prompt", ...}}.

Covers bodies of /v1/chat/completions and /v1/completions; a completion's prompt is used as it is. FIELDS lists all
fields of both APIs. An unsupported field that would change the answer is the record's error, unless it is null or has
its default. Source: OpenAI's API reference; vLLM 0.32, entrypoints/openai (ChatCompletionRequest, CompletionRequest).
"""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from ragspec.errors import RecordError, did_you_mean
from ragspec.inputs.values import (
    id_text,
    kind,
    messages_of,
    names,
    structured_of,
    template_args_of,
    text_of,
    with_metadata,
)
from ragspec.records import Record

ENVELOPE = {"custom_id", "body", "method", "url"}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SIGNED = 1 << 63  # seeds may be any signed 64-bit number; ours are not negative


class Field(NamedTuple):
    """How a body's field is handled. neutral: its default, and values that mean the same; null always does.

    use: "sampling" (our setting `key`), "template" (an argument of the chat template), "read" (by this module),
    "service" (ignored: it concerns the service, not the answer), or "cannot" (unsupported: other values are errors).
    """

    use: Literal["sampling", "template", "read", "service", "cannot"]
    neutral: tuple[Any, ...] = ()
    key: str = ""


FIELDS = {
    "model": Field("read"),
    "messages": Field("read"),
    "prompt": Field("read"),
    "metadata": Field("read"),
    "logprobs": Field("read"),
    "top_logprobs": Field("read"),
    "response_format": Field("read"),
    "structured_outputs": Field("read"),
    "echo": Field("read", (False,)),
    "include_reasoning": Field("read", (True,)),
    "tool_choice": Field("read"),
    "add_special_tokens": Field("read"),
    "reasoning_effort": Field("read"),
    "max_tokens": Field("sampling", key="max_new_tokens"),
    "max_completion_tokens": Field("sampling", key="max_new_tokens"),
    "temperature": Field("sampling", key="temperature"),
    "top_p": Field("sampling", key="top_p"),
    "top_k": Field("sampling", (-1,), key="top_k"),
    "min_p": Field("sampling", key="min_p"),
    "repetition_penalty": Field("sampling", key="repetition_penalty"),
    "presence_penalty": Field("sampling", key="presence_penalty"),
    "frequency_penalty": Field("sampling", key="frequency_penalty"),
    "logit_bias": Field("sampling", key="logit_bias"),
    "stop": Field("sampling", key="stop"),
    "stop_token_ids": Field("sampling", key="stop_token_ids"),
    "min_tokens": Field("sampling", key="min_new_tokens"),
    "ignore_eos": Field("sampling", key="ignore_eos"),
    "seed": Field("sampling", key="seed"),
    "n": Field("sampling", key="n"),
    "tools": Field("template", ([],)),
    "documents": Field("template", ([],)),
    "chat_template_kwargs": Field("template", ({},)),
    "add_generation_prompt": Field("template", (True,)),
    "continue_final_message": Field("template", (False,)),
    "cache_salt": Field("service"),
    "parallel_tool_calls": Field("service"),
    "prediction": Field("service"),  # text that the service may draft from
    "priority": Field("service"),
    "prompt_cache_key": Field("service"),
    "prompt_cache_options": Field("service"),
    "prompt_cache_retention": Field("service"),
    "request_id": Field("service"),
    "safety_identifier": Field("service"),
    "service_tier": Field("service"),
    "session_id": Field("service"),
    "store": Field("service"),
    "stream_interval": Field("service"),
    "stream_options": Field("service"),
    "user": Field("service"),
    "allowed_token_ids": Field("cannot"),
    "audio": Field("cannot"),
    "bad_words": Field("cannot", ([],)),
    "best_of": Field("cannot", (1,)),
    "chat_template": Field("cannot"),
    "ec_transfer_params": Field("cannot", ({},)),
    "function_call": Field("cannot", ("none", "auto")),
    "functions": Field("cannot", ([],)),
    "include_stop_str_in_output": Field("cannot", (False,)),
    "kv_transfer_params": Field("cannot", ({},)),
    "length_penalty": Field("cannot", (1,)),
    "logprob_token_ids": Field("cannot", ([],)),
    "media_io_kwargs": Field("cannot", ({},)),
    "mm_payload": Field("cannot", ("tensors",)),
    "mm_processor_kwargs": Field("cannot", ({},)),
    "modalities": Field("cannot", (["text"],)),
    "moderation": Field("cannot"),
    "prompt_embeds": Field("cannot"),
    "prompt_logprobs": Field("cannot"),
    "repetition_detection": Field("cannot"),
    "return_mm_kwargs": Field("cannot", (False,)),
    "return_prompt_text": Field("cannot", (False,)),
    "return_token_ids": Field("cannot", (False,)),
    "return_token_offsets": Field("cannot", (False,)),
    "return_tokens_as_token_ids": Field("cannot", (False,)),
    "routed_experts_prompt_start": Field("cannot", (0,)),
    "skip_special_tokens": Field("cannot", (True,)),
    "spaces_between_special_tokens": Field("cannot", (True,)),
    "stream": Field("cannot", (False,)),
    "suffix": Field("cannot", ("",)),
    "thinking_token_budget": Field("cannot"),
    "truncate_prompt_tokens": Field("cannot"),
    "truncation_side": Field("cannot"),
    "use_beam_search": Field("cannot", (False,)),
    "verbosity": Field("cannot", ("medium",)),
    "vllm_xargs": Field("cannot", ({},)),
    "watermarking": Field("cannot", (False,)),
    "web_search_options": Field("cannot"),
}
DOABLE = sorted(name for name, field in FIELDS.items() if field.use != "cannot")


def parse_batch_line(value: dict[str, Any]) -> Record:
    """Return the Record of a line. Raises RecordError."""
    body = value.get("body")
    if not isinstance(body, dict):
        raise RecordError(f'"body" must be an object with "messages" or "prompt", got {kind(body)}')
    if value.get("custom_id") is None:
        raise RecordError('"custom_id" is missing; a line with "body" needs one')
    if value.get("url") is not None and value["url"] not in (CHAT, COMPLETION):
        raise RecordError(f'"url": {value["url"]!r} is not supported; known: {CHAT}, {COMPLETION}')
    given = _given_fields(body)
    structured = structured_of({key: field for key, field in given.items() if key != "structured"}, "body.")
    _refuse_undoable(given)
    chat = body.get("messages") is not None
    if chat and body.get("prompt") is not None:
        raise RecordError('"body.messages" and "body.prompt": keep one of them')
    others = {key: field for key, field in value.items() if key not in ENVELOPE}
    prompts = () if chat else _prompts(body)
    return Record(
        id=id_text(value["custom_id"]) or "0",
        messages=messages_of(body["messages"]) if chat else None,
        prompt=prompts[0] if prompts else None,
        prompts=prompts if len(prompts) > 1 else (),
        sampling=_sampling(given, chat),
        metadata=with_metadata(others, body.get("metadata")),
        raw=not chat,
        structured=structured,
        model=body["model"] if isinstance(body.get("model"), str) else None,
        template_args=_template_args(given) if chat else {},
        echo=_switch(given, "echo", default=False),
        special_tokens=_special_tokens(given, chat),
        reasoning=_switch(given, "include_reasoning", default=True),
    )


def _given_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are neither null nor neutral."""
    given = {key: field for key, field in body.items() if field is not None and not _is_neutral(key, field)}
    if given.get("best_of") == body.get("n"):
        given.pop("best_of", None)
    if "max_completion_tokens" in given:
        given.pop("max_tokens", None)  # deprecated name of the same field
    return given


def _is_neutral(key: str, value: Any) -> bool:
    neutral = FIELDS[key].neutral if key in FIELDS else ()
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def _refuse_undoable(given: dict[str, Any]) -> None:
    for key in sorted(given):
        if key == "extra_body":
            raise RecordError(
                '"body.extra_body": is an argument of the Python client, not of the API; put its keys into "body"'
            )
        if key not in FIELDS:
            raise RecordError(f'"body.{key}" is not known{did_you_mean(key, DOABLE)}')
        if FIELDS[key].use == "cannot":
            default = next(iter(FIELDS[key].neutral), None)
            raise RecordError(f'"body.{key}" is not supported; remove it, or leave it at {json.dumps(default)}')
    choice = given.get("tool_choice")
    if choice not in (None, "none", "auto") or ("tools" in given and choice != "none"):
        raise RecordError(
            '"body.tool_choice" must be "none": tool calls are not read out of answers (the chat template gets "tools")'
        )


def _template_args(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template. Source: vLLM 0.32, ChatCompletionRequest.build_chat_params."""
    args = template_args_of(given.get("chat_template_kwargs"), "body.chat_template_kwargs")
    effort = given.get("reasoning_effort")
    if effort is not None:
        args = {"enable_thinking": effort != "none", **args, "reasoning_effort": effort}
    for key in ("tools", "documents"):
        if key in given:
            if not isinstance(given[key], list) or not all(isinstance(each, dict) for each in given[key]):
                raise RecordError(f'"body.{key}" must be a list of objects, got {kind(given[key])}')
            args[key] = given[key]
    if _switch(given, "continue_final_message", default=False):
        if given.get("add_generation_prompt"):
            raise RecordError('"body.continue_final_message" and "body.add_generation_prompt": keep one of them')
        return args | {"continue_final_message": True, "add_generation_prompt": False}
    return args if _switch(given, "add_generation_prompt", default=True) else args | {"add_generation_prompt": False}


def _special_tokens(given: dict[str, Any], chat: bool) -> bool:
    """Return whether to add the tokenizer's special tokens to a completion's prompt."""
    wanted = _switch(given, "add_special_tokens", default=not chat)
    if chat and wanted:
        raise RecordError('"body.add_special_tokens": a chat template writes its own; remove it')
    return wanted


def _switch(given: dict[str, Any], key: str, *, default: bool) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise RecordError(f'"body.{key}" must be true or false, got {kind(value)}')
    return value


def _sampling(given: dict[str, Any], chat: bool) -> dict[str, Any]:
    sampling = {FIELDS[key].key: field for key, field in given.items() if FIELDS[key].use == "sampling"}
    if isinstance(seed := sampling.get("seed"), int):
        sampling["seed"] = seed % SIGNED
    if (logprobs := _logprobs(given, chat)) is not None:
        sampling["logprobs"] = logprobs
    return sampling


MOST_LOGPROBS = 20  # as in OpenAI's API and in SamplingConfig


def _logprobs(given: dict[str, Any], chat: bool) -> int | None:
    """Return how many likeliest tokens to report per position; None for no logprobs."""
    logprobs, top = given.get("logprobs"), given.get("top_logprobs") or 0
    if not chat:
        if logprobs is False:
            return None
        if logprobs is not None and (isinstance(logprobs, bool) or not isinstance(logprobs, int)):
            raise RecordError(f'"body.logprobs" must be a whole number, got {kind(logprobs)}')
        if logprobs is not None and given.get("echo"):
            raise RecordError('"body.echo": the prompt has no logprobs here; remove one of the two')
        return logprobs
    if logprobs not in (None, True, False):
        raise RecordError(f'"body.logprobs" must be true or false, got {kind(logprobs)}')
    if top and not logprobs:
        raise RecordError('"body.top_logprobs" needs "logprobs": true')
    if not isinstance(top, int):
        raise RecordError(f'"body.top_logprobs" must be a whole number, got {kind(top)}')
    if not 0 <= top <= MOST_LOGPROBS:
        raise RecordError(f'"body.top_logprobs" must be from 0 to {MOST_LOGPROBS}, got {top}')
    return top if logprobs else None


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
