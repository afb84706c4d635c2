"""The user message's Jinja2 template: the config's own, one that it names, or the default; always sandboxed."""

from __future__ import annotations

from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ragspec.errors import ConfigError

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
