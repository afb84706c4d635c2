"""Messages -> text by the model's chat template, whatever that template can do.

    >>> Chat(tokenizer, {"enable_thinking": False}).render([{"role": "user", "content": "Why?"}])

What a template takes is tried once, not looked up: one without a system role has the system prompt put before the first
user message, one that reads content as parts gets parts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateSyntaxError

from ragspec.errors import ConfigError, RecordError, did_you_mean
from ragspec.records import Tokenizer

log = logging.getLogger(__name__)
SYSTEM = ("system", "developer")
ROLES = (*SYSTEM, "user", "assistant", "tool")
PROBE = "ragspec asks"  # a text that no template has
Message = dict[str, Any]
# arguments of apply_chat_template that are not the template's
RESERVED = {
    "conversation", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip


class Chat:
    """One model's chat template. args: what it is called with, unless a record says otherwise.

    Raises ConfigError for a template that is none, and for arguments that are not a template's.
    """

    def __init__(self, tokenizer: Tokenizer, args: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._args = dict(args)
        self.folded = False  # whether a system prompt was put into a user message
        if bad := sorted(RESERVED & args.keys()):
            raise ConfigError(f"prompt.chat_template_kwargs.{bad[0]}: is ragspec's own; remove it")
        try:
            self._tries([{"role": "user", "content": PROBE}])
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"model: its chat template is not valid Jinja2 (line {error.lineno}: {error.message}); mend "
                "chat_template.jinja or tokenizer_config.json in its folder, or set prompt.chat: false"
            ) from None

    def render(self, messages: Sequence[Message], args: Mapping[str, Any]) -> str:
        """Return the messages as a prompt. args: a record's own.

        Raises RecordError where the template refuses them, or would leave out one of them or the documents.
        """
        if bad := sorted(RESERVED & args.keys()):
            raise RecordError(f'"chat_template_kwargs.{bad[0]}" is not a template\'s; remove it')
        given = list(messages)
        try:
            text = self._tokenizer.render_chat(self._adapted(given), **{**self._args, **args})
        except Exception as error:  # a program of the model's authors
            log.debug("the chat template failed", exc_info=error)
            raise RecordError(f"the model's chat template refuses these messages: {error}") from None
        for at, message in enumerate(given):
            if self._leaves_out(given, at, args, text):
                known = did_you_mean(message["role"], ROLES) if message["role"] not in ROLES else ""
                raise RecordError(
                    f'the model\'s chat template leaves out a message with the role "{message["role"]}" '
                    f"({at + 1} of {len(given)}){known or '; remove it, or put it into another one'}"
                )
        if args.get("documents") and self._tries(self._adapted(given), {**args, "documents": None}) == text:
            raise RecordError('the model\'s chat template does not read "documents"; put them into a message')
        return text

    def _leaves_out(self, messages: list[Message], at: int, args: Mapping[str, Any], text: str) -> bool:
        """Return whether nothing of a message is in the prompt `text`. What is beside tool calls may be left out."""
        message = messages[at]
        content = message["content"].strip()
        if not content or message.get("tool_calls") or (message["role"] in ROLES and content in text):
            return False
        found = self._tries(self._adapted([*messages[:at], {**message, "content": PROBE}, *messages[at + 1 :]]), args)
        return found is not None and PROBE not in found

    def _adapted(self, messages: list[Message]) -> list[Message]:
        if any(message["role"] == "developer" for message in messages) and not self._developer and self._system:
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        if messages[0]["role"] in SYSTEM and not self._takes(messages[0]["role"]):
            messages = self._folded(messages)
        return [_in_parts(message) for message in messages] if self._wants_parts else messages

    def _folded(self, messages: list[Message]) -> list[Message]:
        """Return messages with the first one, a system prompt, before what the user says first."""
        self.folded = True
        system, rest = messages[0]["content"], messages[1:]
        first = next((at for at, message in enumerate(rest) if message["role"] == "user"), None)
        if first is None:
            return [{"role": "user", "content": system}, *rest]
        user = rest[first]
        return [*rest[:first], {**user, "content": f"{system}\n\n{user['content']}"}, *rest[first + 1 :]]

    def _takes(self, role: str) -> bool:
        return self._system if role == "system" else self._developer

    @cached_property
    def _system(self) -> bool:
        """Whether a system prompt is written. Where not even a user message is, that is not why."""
        return self._writes_first("system") or not self._writes_first("user")

    @cached_property
    def _developer(self) -> bool:
        return self._writes_first("developer")

    def _writes_first(self, role: str) -> bool:
        messages = [{"role": role, "content": PROBE}]
        if role != "user":
            messages.append({"role": "user", "content": "x"})
        return self._writes(
            self._tries([_in_parts(message) for message in messages] if self._wants_parts else messages)
        )

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether content is read as a list of parts: a text is then written as nothing, or is an error."""
        message = {"role": "user", "content": PROBE}
        return not self._writes(self._tries([message])) and self._writes(self._tries([_in_parts(message)]))

    def _tries(self, messages: list[Message], args: Mapping[str, Any] | None = None) -> str | None:
        """Return what the template writes, None where it fails. Raises TemplateSyntaxError."""
        try:
            return self._tokenizer.render_chat(messages, **{**self._args, **(args or {})})
        except TemplateSyntaxError:
            raise
        except Exception as error:  # a program of the model's authors
            log.debug("the chat template refuses a probe", exc_info=error)
            return None

    @staticmethod
    def _writes(rendered: str | None) -> bool:
        return rendered is not None and PROBE in rendered


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}
