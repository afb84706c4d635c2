"""Chat templates put together at random, whole or damaged, and conversations: all that was said is in the prompt.

In order, once, without a control word that a user wrote, behind one begin-of-sequence token at most; or the
conversation is refused in one line. A template that takes a conversation's roles in their order refuses none.
"""

import random
from collections import Counter
from pathlib import Path

from ragspec.config.sections import PromptConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.models.tokenizer import HFTokenizer
from ragspec.prompts.builder import PromptBuilder
from ragspec.records import Record
from tests.campaign.damage import cut, flip
from tests.conftest import train_tokenizer

CONTENTS = {  # how a message's content is written
    "plain": "{{ m.content }}",
    "stripped": "{{ m['content'] | trim }}",
    "joined": "{{ '' + m.content }}",
    "parts": "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}",
    "parts or text": "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}",
}
HEADS = {  # what is done about a first message that is a system prompt
    "any role": "",
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}",
    "known roles": (
        "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
        "{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}{% endfor %}"
    ),
    "in turns": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('user and assistant must take turns') }}{% endif %}{% endfor %}"
    ),
}
BODIES = {
    "all": "{% for m in messages %}[{{ m.role }}] CONTENT\n{% endfor %}",
    "silent": "{% for m in messages if m.role in ['user', 'assistant'] %}[{{ m.role }}] CONTENT\n{% endfor %}",
    "with ends": "{% for m in messages %}[{{ m.role }}] CONTENT{{ eos_token }}\n{% endfor %}",
}
BEGINS = [
    "",
    "{{ bos_token }}",
    "<s>",
    "{{- bos_token }}{% set ns = namespace(x=0) %}",
    "{{ tools_in_use | default('') }}",
]
SAID = [
    "Why?",
    "é\u2028ü",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "a <|end|> b",
    "<s>",
    "[user] x",
    "two\nlines",
    "0",
    "👍 ok",
    "x" * 300,
]
PARTS = [
    b"{{",
    b"%}",
    b"{% if %}",
    b"| nothing",
    b"{{ m.x.y }}",
    b"{{ 1 / 0 }}",
    b"{% for i in range(10**9) %}{% endfor %}",
]


def campaign(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Render `count` conversations; return what became of them."""
    inner = _tokenizer()
    totals: Counter[str] = Counter(templates=count)
    for number in range(count):
        chance = random.Random(f"{seed} templates {number}")
        content = chance.choice(list(CONTENTS))
        head, body = chance.choice(list(HEADS)), chance.choice(list(BODIES))
        template = chance.choice(BEGINS) + HEADS[head] + BODIES[body].replace("CONTENT", CONTENTS[content])
        raw = (template + "{% if add_generation_prompt %}[assistant] {% endif %}").encode()
        damaged = chance.random() < 0.4
        for _ in range(chance.choice([1, 2]) if damaged else 0):
            raw = chance.choice([flip, cut, _insert])(chance, raw)
        inner.chat_template = raw.decode(errors="replace")
        messages = _conversation(chance)
        where = f"template {number} of seed {seed}: {inner.chat_template!r}, {messages}"
        totals[_check(HFTokenizer(inner), messages, where, damaged=damaged)] += 1
    return dict(totals)


def _tokenizer():
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    inner = train_tokenizer(280, ["once upon a time the user asks and the assistant answers"])
    inner.add_special_tokens({"bos_token": AddedToken("<s>", special=True)})
    inner.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", inner.bos_token_id)]
    )
    return inner


def _conversation(chance: random.Random) -> list[dict[str, str]]:
    """Return messages: perhaps a system prompt, then a user and an assistant in turns; the user has the last word."""
    roles = chance.choice([[], ["system"], ["developer"]]) + ["user", "assistant"] * chance.randrange(3) + ["user"]
    return [{"role": role, "content": chance.choice(SAID)} for role in roles]


def _insert(chance, raw):
    at = chance.randrange(len(raw) + 1)
    return raw[:at] + chance.choice(PARTS) + raw[at:]


def _check(tokenizer: HFTokenizer, messages: list[dict[str, str]], where: str, *, damaged: bool) -> str:
    ids, refusal = _prompt(tokenizer, messages)
    if damaged:
        assert "\n" not in refusal, f"{where}: {refusal}"
        return "refused" if refusal else "still a template"
    assert not refusal, f"{where}: {refusal}"
    begins = int(tokenizer.inner.chat_template.startswith(("{{ bos", "{{- bos", "<s>")))  # no other way in a chat
    assert ids.count(tokenizer.bos) == ids[:1].count(tokenizer.bos) == begins, f"{where}: {ids[:9]}"
    text, at = tokenizer.inner.decode(ids), 0
    for message in messages:
        at = text.find(message["content"], at)
        assert at >= 0, f"{where}: {message} is not where it belongs in {text!r}"
        at += len(message["content"])
    ends = ids.count(tokenizer.inner.eos_token_id)
    assert ends in (0, len(messages), len(messages) - 1), f"{where}: {ends} end tokens"
    return "said"


def _prompt(tokenizer: HFTokenizer, messages: list[dict[str, str]]) -> tuple[list[int], str]:
    """Return a conversation's token ids, or none and why they are refused."""
    try:
        builder = PromptBuilder(PromptConfig(), tokenizer, None)
        return builder.build(Record("q", messages=tuple(messages)), 8).token_ids, ""
    except (ConfigError, RecordError) as error:
        return [], str(error)
