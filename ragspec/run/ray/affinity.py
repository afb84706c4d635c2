"""What records share with others, so that one worker gets them all: its cache has their prefix, its drafts their words.

>>> group_of(Record("q1", query="Who wrote it?", contexts=(Passage("1", "Ann wrote it."),)))
b'...'
"""

from __future__ import annotations

from hashlib import blake2b

from ragspec.records import Record

HEAD = 1024  # characters at the begin of a prompt without passages; what is shorter is not worth sharing
HEAD_TOKENS = 256


def group_of(record: Record) -> bytes | None:
    """Return what names the group of records that begin alike; None for a record that hardly shares anything."""
    head = _head(record)
    return blake2b(head.encode(), digest_size=16).digest() if head else None


def size_of(record: Record) -> int:
    """Return roughly how many characters a record has."""
    prompts = [record.prompt or "", *record.prompts]
    messages = sum(len(str(message.get("content"))) for message in record.messages or ())
    return sum(len(passage.text) for passage in record.contexts) + sum(map(len, prompts)) + messages


def _head(record: Record) -> str:
    if record.contexts:
        return record.contexts[record.order[0] if record.order else 0].text
    if record.messages is not None:
        return _long("\0".join(str(message.get("content")) for message in record.messages))
    prompt = record.prompt if record.prompt is not None else next(iter(record.prompts), "")
    if isinstance(prompt, str):
        return _long(prompt)
    return str(prompt[:HEAD_TOKENS]) if len(prompt) > HEAD_TOKENS else ""


def _long(text: str) -> str:
    return text[:HEAD] if len(text) > HEAD else ""
