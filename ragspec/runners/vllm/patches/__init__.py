"""What is changed in vLLM's own code, a module each; every one says what it changes, why, and until when.

A test resolves each name in `changes` in the installed vLLM, so a release that moves one is noticed before users do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patch:
    """A change to vLLM's code, made in an engine of this process only.

    changes: the attributes that are replaced, as "module:object.attribute". versions: of vLLM for which it was read.
    why: what is wrong without it. upstream: the thread about it, "" where none is known. until: when it can go.
    """

    changes: tuple[str, ...]
    versions: str
    why: str
    upstream: str
    until: str
