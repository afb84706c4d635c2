"""The user message's Jinja2 template: the config's own, one that it names, or the default; always sandboxed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ragspec.errors import ConfigError, RecordError, did_you_mean
from ragspec.records import Tokenizer

DEFAULT_TEMPLATE = """\
{% for passage in contexts %}{% if passage.title %}{{ passage.title }}
{% endif %}{{ passage.text }}

{% endfor %}{% if best_first %}Most relevant first: passage {{ best_first | join(", ") }}.

{% endif %}{% if contexts %}Question: {% endif %}{{ query }}{% if not chat %}
Answer:{% endif %}"""
CITATIONS = """\
{% for passage in contexts %}[{{ loop.index }}] {% if passage.title %}{{ passage.title }}
{% endif %}{{ passage.text }}

{% endfor %}{% if best_first %}Most relevant first: [{{ best_first | join("], [") }}].

{% endif %}Question: {{ query }}{% if contexts %}
Answer from the passages above, and cite each one you use by its number, like [1].{% endif %}{% if not chat %}
Answer:{% endif %}"""
NAMED = {"citations": CITATIONS}  # templates that a config may ask for by name
VARIABLES = ("query", "contexts", "best_first", "system", "metadata", "id", "chat")


def uses_contexts(template: str | None) -> bool:
    """Return whether a config's own template has passages in it; the default one takes what comes."""
    if template is None:
        return False
    parsed = ImmutableSandboxedEnvironment().parse(NAMED.get(template, template))
    return "contexts" in meta.find_undeclared_variables(parsed)


def compiled(template: str | None, *, ranks: bool = False) -> Any:
    """Return the template that a config's `prompt.template` means, ready to render. Raises ConfigError.

    ranks: it is to say which passages are most relevant.
    """
    text = NAMED.get(template or "", template) or DEFAULT_TEMPLATE
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        used = meta.find_undeclared_variables(environment.parse(text))
        unknown = used - set(VARIABLES)
        ready = environment.from_string(text)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"prompt.template{f':{line}' if line else ''}: not valid Jinja2: {error}") from None
    if unknown:
        raise ConfigError(f'prompt.template: "{sorted(unknown)[0]}" is not known; it may use {", ".join(VARIABLES)}')
    if not used:
        raise ConfigError(
            f'prompt.template: "{text[:40]}" is the same for every record; write {{{{ query }}}} into it, or '
            "give the name of a .jinja file"
        )
    if ranks and "best_first" not in used:
        raise ConfigError(
            'prompt.show_ranks: the template does not use them; write {{ best_first | join(", ") }} into it (the '
            "passages' places, the most relevant first)"
        )
    return ready


# -- messages -> text by the model's chat template, whatever that template can do -------------------------------------
#
#     >>> Chat(tokenizer, {"enable_thinking": False}).render([{"role": "user", "content": "Why?"}])
#
# What a template takes is tried once, not looked up: one without a system role has the system prompt put before the
# first user message, one that reads content as parts gets parts. What it would leave out without a word is an error.


log = logging.getLogger(__name__)
SYSTEM = ("system", "developer")
ROLES = (*SYSTEM, "user", "assistant", "tool")
PROBE = "ragspec asks"  # a text that no template has
CALL = "ragspec01"  # nine letters and digits
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
        self._left_out = lru_cache(maxsize=256)(self._find_left_out)
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
        adapted, given = self._adapted(list(messages)), {**self._args, **args}
        try:
            written = self._tokenizer.render_chat(self._shaped(adapted), **given)
        except Exception as error:  # a program of the model's authors
            log.debug("the chat template failed", exc_info=error)
            raise RecordError(f"the model's chat template refuses these messages: {error}") from None
        self._check_written(adapted)
        if args.get("documents") and written == self._tries(self._shaped(adapted), **{**args, "documents": None}):
            raise RecordError(
                'the model\'s chat template does not write "documents"; put them into the messages, or give the record '
                'a "query" and "contexts"'
            )
        return written

    def _check_written(self, messages: Sequence[Message]) -> None:
        """Raise RecordError for a message, or calls of tools, that the template leaves out."""
        for at in self._left_out(tuple((message["role"], bool(message.get("tool_calls"))) for message in messages)):
            role, calls = messages[at]["role"], messages[at].get("tool_calls")
            if calls or messages[at]["content"].strip():
                known = "" if calls or role in ROLES else did_you_mean(role, ROLES)
                what = '"tool_calls"' if calls else f'the role "{role}"'
                raise RecordError(
                    f"the model's chat template leaves out message {at + 1} of {len(messages)}: it does not write "
                    f"{what} there{known or '; put what it says into another message'}"
                )

    def _find_left_out(self, shape: tuple[tuple[str, bool], ...]) -> list[int]:
        """Return which of the messages with these roles are not written. shape: each one's, and whether it calls tools.

        A call is looked for by its name: what else such a message says, some templates leave out by design.
        """
        probes = [f"{PROBE} {at}." for at in range(len(shape))]
        messages = [
            {"role": role, "content": "" if calls else probe, **(_calls(probe) if calls else _answers(role))}
            for (role, calls), probe in zip(shape, probes, strict=True)
        ]
        written = self._tries(self._shaped(messages))
        return [] if written is None else [at for at, probe in enumerate(probes) if probe not in written]

    def _adapted(self, messages: list[Message]) -> list[Message]:
        if any(message["role"] == "developer" for message in messages) and not self._developer and self._system:
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        if messages[0]["role"] in SYSTEM and not self._takes(messages[0]["role"]):
            messages = self._folded(messages)
        return messages

    def _shaped(self, messages: list[Message]) -> list[Message]:
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
        return self._writes(self._tries(self._shaped(messages)))

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether content is read as a list of parts: a text is then written as nothing, or is an error."""
        message = {"role": "user", "content": PROBE}
        return not self._writes(self._tries([message])) and self._writes(self._tries([_in_parts(message)]))

    def _tries(self, messages: list[Message], **args: Any) -> str | None:
        """Return what the template writes, None where it fails. Raises TemplateSyntaxError."""
        try:
            return self._tokenizer.render_chat(messages, **{**self._args, **args})
        except TemplateSyntaxError:
            raise
        except Exception as error:  # a program of the model's authors
            log.debug("the chat template refuses a probe", exc_info=error)
            return None

    @staticmethod
    def _writes(rendered: str | None) -> bool:
        return rendered is not None and PROBE in rendered


def _calls(name: str) -> Message:
    """Return a call of the tool `name`, with an id that Mistral's templates take."""
    return {"tool_calls": [{"id": CALL, "type": "function", "function": {"name": name, "arguments": {}}}]}


def _answers(role: str) -> Message:
    """Return what a tool's message has besides."""
    return {"tool_call_id": CALL, "name": "tool"} if role == "tool" else {}


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}
