"""Chat messages as OpenAI's API has them -> as chat templates take them.

>>> messages_of([{"role": "user", "content": [{"type": "text", "text": "Why?"}]}])
({'role': 'user', 'content': 'Why?'},)

Source: vLLM 0.32, renderers/chat_utils.py: text parts are joined by line ends, the arguments of tool calls become
objects, the content that an assistant's message with tool calls lacks is an empty text.
"""

from __future__ import annotations

from typing import Any

from ragspec.errors import RecordError
from ragspec.inputs.values import kind
from ragspec.json_text import JSONDecodeError, loads

CARRIED = ("name", "tool_call_id", "reasoning", "reasoning_content")  # to the template, as they are


def messages_of(value: Any) -> tuple[dict[str, Any], ...]:
    """Return a record's messages. Raises RecordError."""
    if not isinstance(value, list) or not value:
        raise RecordError(f'"messages" must be a non-empty list of {{"role", "content"}}, got {kind(value)}')
    return tuple(_message(item, f'"messages" item {position}') for position, item in enumerate(value, 1))


def template_args_of(value: Any, name: str = "chat_template_kwargs") -> dict[str, Any]:
    """Return what a record's chat template is called with. name: of its field. Raises RecordError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RecordError(f'"{name}" must be an object, got {kind(value)}')
    return dict(value)


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise RecordError(f'{where} must be an object with "role" and "content"')
    message = {"role": item["role"], "content": _content(item, where)}
    for key in CARRIED:
        if item.get(key) is not None:
            if not isinstance(item[key], str):
                raise RecordError(f'{where}: "{key}" must be a string, got {kind(item[key])}')
            message[key] = item[key]
    if item.get("tool_calls"):
        message["tool_calls"] = _tool_calls(item["tool_calls"], where)
    return message


def _content(item: dict[str, Any], where: str) -> str:
    content = item.get("content")
    if content is None and item.get("tool_calls"):
        return ""
    if isinstance(content, list):  # content parts
        parts = [
            text for part in content if isinstance(text := part.get("text") if isinstance(part, dict) else part, str)
        ]
        if len(parts) < len(content):
            raise RecordError(f'{where}: only content parts with "type": "text" are supported')
        content = "\n".join(parts)
    if not isinstance(content, str):
        raise RecordError(f'{where}: "content" must be a string, got {kind(content)}')
    return content


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RecordError(f'{where}: "tool_calls" must be a list, got {kind(value)}')
    return [_tool_call(call, where) for call in value]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordError(f'{where}: a tool call must be {{"type": "function", "function": {{"name", "arguments"}}}}')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments)
        except JSONDecodeError as error:
            raise RecordError(f'{where}: the "arguments" of a tool call are not JSON ({error})') from None
    if not isinstance(arguments, dict):
        raise RecordError(f'{where}: the "arguments" of a tool call must be an object, got {kind(arguments)}')
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
