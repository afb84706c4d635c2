"""Changes to vLLM's own code, one module each; every one says what it changes, why, and until when.

A test resolves each name in `changes` in the installed vLLM, so that a release that moves one fails there first.
"""

from __future__ import annotations

from dataclasses import dataclass

KEY = "ragspec"  # ours in vLLM's additional_config, in a request's extra_args and in its last output


@dataclass(frozen=True, slots=True)
class Patch:
    """A change to vLLM's code, made in engines of this process only.

    changes: replaced attributes, as "module:object.attribute". versions: of vLLM that it was written for. why: what
    goes wrong without it. upstream: the thread about it, "" if none is known. until: when it can be removed.
    """

    changes: tuple[str, ...]
    versions: tuple[str, ...]
    why: str
    upstream: str
    until: str
