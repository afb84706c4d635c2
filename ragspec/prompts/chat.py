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

from ragspec.errors import ConfigError, RecordError
from ragspec.records import Tokenizer

log = logging.getLogger(__name__)
SYSTEM = ("system", "developer")
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
        """Return the messages as a prompt. args: a record's own. Raises RecordError where the template refuses them."""
        if bad := sorted(RESERVED & args.keys()):
            raise RecordError(f'"chat_template_kwargs.{bad[0]}" is not a template\'s; remove it')
        try:
            return self._tokenizer.render_chat(self._adapted(list(messages)), **{**self._args, **args})
        except Exception as error:  # a program of the model's authors
            log.debug("the chat template failed", exc_info=error)
            raise RecordError(f"the model's chat template refuses these messages: {error}") from None

    def _adapted(self, messages: list[Message]) -> list[Message]:
        if messages[0]["role"] in SYSTEM and not self._takes(messages[0]["role"]):
            messages = self._folded(messages)
        return [_in_parts(message) for message in messages] if self._wants_parts else messages

    def _folded(self, messages: list[Message]) -> list[Message]:
        """Return messages with the first one, a system prompt, before what the user says first."""
        if messages[0]["role"] == "developer" and self._takes("system"):
            return [{**messages[0], "role": "system"}, *messages[1:]]
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

    def _tries(self, messages: list[Message]) -> str | None:
        """Return what the template writes, None where it fails. Raises TemplateSyntaxError."""
        try:
            return self._tokenizer.render_chat(messages, **self._args)
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
