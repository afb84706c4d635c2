"""Templates: the sandboxed Jinja2 template of the user message, and the model's chat template."""

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
NAMED = {"citations": CITATIONS}  # templates that a config can name
VARIABLES = ("query", "contexts", "best_first", "system", "metadata", "id", "chat")


def uses_contexts(template: str | None) -> bool:
    """Return whether a config's own template uses passages; False for the default one and for an invalid one."""
    return _uses(template, "contexts")


def uses_metadata(template: str | None) -> bool:
    """Return whether a config's own template uses a record's other fields."""
    return _uses(template, "metadata")


def _uses(template: str | None, name: str) -> bool:
    if template is None:
        return False
    try:
        parsed = ImmutableSandboxedEnvironment().parse(NAMED.get(template, template))
    except TemplateError:  # compiled() reports it
        return False
    return name in meta.find_undeclared_variables(parsed)


def compiled(template: str | None, *, ranks: bool = False) -> Any:
    """Return the template of a config's `prompt.template`, compiled. Raises ConfigError.

    ranks: require the template to show which passages are most relevant.
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


# -- chat templates --------------------------------------------------------------------------------

log = logging.getLogger(__name__)
SYSTEM = ("system", "developer")
ROLES = (*SYSTEM, "user", "assistant", "tool")
PROBE = "ragspec asks"  # a text that no template contains
CALL = "ragspec01"  # a tool call id; Mistral's templates require nine letters and digits
Message = dict[str, Any]
# arguments of apply_chat_template itself
RESERVED = {
    "conversation", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip


class Chat:
    """One model's chat template.

        >>> Chat(tokenizer, {"enable_thinking": False}).render([{"role": "user", "content": "Why?"}], {})

    What the template supports is probed once, not looked up: without a system role, the system prompt goes before the
    first user message; a template that reads content as parts gets parts. A silently dropped message is an error.
    Raises ConfigError for an invalid template and for arguments reserved for ragspec. args: template arguments, which a
    record may override.
    """

    def __init__(self, tokenizer: Tokenizer, args: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._args = dict(args)
        self.folded = False  # whether a system prompt was moved into a user message
        self._left_out = lru_cache(maxsize=256)(self._find_left_out)
        if bad := sorted(RESERVED & args.keys()):
            raise ConfigError(f"prompt.chat_template_kwargs.{bad[0]}: is set by ragspec; remove it")
        try:
            self._try([{"role": "user", "content": PROBE}])
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"model: its chat template is not valid Jinja2 (line {error.lineno}: {error.message}); fix "
                "chat_template.jinja or tokenizer_config.json in its folder, or set prompt.chat: false"
            ) from None

    def render(self, messages: Sequence[Message], args: Mapping[str, Any]) -> str:
        """Return the messages as a prompt. args: the record's template arguments.

        Raises RecordError if the template refuses the messages or would drop one of them or the documents.
        """
        if bad := sorted(RESERVED & args.keys()):
            raise RecordError(f'"chat_template_kwargs.{bad[0]}" is not a template argument; remove it')
        adapted, given = self._adapted(list(messages)), arguments(messages, self._args, args)
        try:
            written = self._tokenizer.render_chat(self._shaped(adapted), **given)
        except Exception as error:  # the template may raise anything
            log.debug("the chat template failed", exc_info=error)
            raise RecordError(f"the model's chat template rejects these messages: {error}") from None
        self._check_written(adapted)
        if args.get("documents") and written == self._try(self._shaped(adapted), **{**given, "documents": None}):
            raise RecordError(
                'the model\'s chat template does not write "documents"; put them into the messages, or give the record '
                'a "query" and "contexts"'
            )
        return written

    def _check_written(self, messages: Sequence[Message]) -> None:
        """Raise RecordError for a message or tool call that the template drops."""
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
        """Return the indices of messages that the template drops. shape: each message's role, and whether it has calls.

        A call is found by its name only: some templates drop the other content of such a message by design.
        """
        probes = [f"{PROBE} {at}." for at in range(len(shape))]
        messages = [
            {"role": role, "content": "" if calls else probe, **(_calls(probe) if calls else _answers(role))}
            for (role, calls), probe in zip(shape, probes, strict=True)
        ]
        written = self._try(self._shaped(messages))
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
        """Return messages with the leading system prompt moved into the first user message."""
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
        """Return whether the template writes a system prompt; True if it does not even write a user message."""
        return self._writes_first("system") or not self._writes_first("user")

    @cached_property
    def _developer(self) -> bool:
        return self._writes_first("developer")

    def _writes_first(self, role: str) -> bool:
        messages = [{"role": role, "content": PROBE}]
        if role != "user":
            messages.append({"role": "user", "content": "x"})
        return self._writes(self._try(self._shaped(messages)))

    @cached_property
    def _wants_parts(self) -> bool:
        """Return whether content must be a list of parts: a plain text is dropped or is an error."""
        message = {"role": "user", "content": PROBE}
        return not self._writes(self._try([message])) and self._writes(self._try([_in_parts(message)]))

    def _try(self, messages: list[Message], **args: Any) -> str | None:
        """Return the rendered messages, None if the template fails. Raises TemplateSyntaxError."""
        try:
            return self._tokenizer.render_chat(messages, **{**self._args, **args})
        except TemplateSyntaxError:
            raise
        except Exception as error:  # the template may raise anything
            log.debug("the chat template refuses a probe", exc_info=error)
            return None

    @staticmethod
    def _writes(rendered: str | None) -> bool:
        return rendered is not None and PROBE in rendered


def arguments(messages: Sequence[Message], config: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's template arguments: the config's and its own, which win.

    The config's `continue_final_message` is for records that end with an answer; the others get one.
    """
    answered = messages[-1]["role"] != "assistant" and not record.get("continue_final_message")
    if answered and config.get("continue_final_message"):
        config = {**config, "continue_final_message": False, "add_generation_prompt": True}
    return {**config, **record}


def _calls(name: str) -> Message:
    """Return a call of the tool `name`."""
    return {"tool_calls": [{"id": CALL, "type": "function", "function": {"name": name, "arguments": {}}}]}


def _answers(role: str) -> Message:
    """Return the extra fields of a tool message."""
    return {"tool_call_id": CALL, "name": "tool"} if role == "tool" else {}


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}
