"""Can a draft model speak to its target? Judged by the token maps, not by `vocab_size`.

transformers and vLLM compare sizes only: two unrelated tokenizers of the same size pass (and every draft is rejected),
one tokenizer with two paddings does not (and is re-tokenised at every step for nothing).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two token maps side by side. `shared` ids mean the same token in both; `differing` ids do not."""

    shared: int
    differing: int
    example: str  # the first difference, in words; "" if there is none

    @property
    def same(self) -> bool:
        """Whether a token id of one means the same in the other, wherever both have it."""
        return self.differing == 0 and self.shared > 0


def compare(target: Any, draft: Any) -> Comparison:
    """Return how the token maps of two transformers tokenizers agree."""
    ours = {i: token for token, i in target.get_vocab().items()}
    theirs = {i: token for token, i in draft.get_vocab().items()}
    common = ours.keys() & theirs.keys()
    differing = sorted(i for i in common if ours[i] != theirs[i])
    first = differing[0] if differing else None
    example = "" if first is None else f"token {first} is {ours[first]!r} in the target, {theirs[first]!r} in the draft"
    return Comparison(len(common) - len(differing), len(differing), example)


def fits(target: Any, target_size: int, draft: Any, draft_size: int) -> tuple[bool, str]:
    """Return whether draft tokens can be handed to the target as they are, and if not, why in words.

    target_size, draft_size: rows of the models' embeddings. The draft must be able to read every target token, and
    must not have tokens of its own that the target cannot read.
    """
    result = compare(target, draft)
    if not result.same:
        total = result.shared + result.differing
        return False, f"{result.differing:,} of {total:,} tokens differ: {result.example}"
    highest_ours, highest_theirs = max(target.get_vocab().values()), max(draft.get_vocab().values())
    if highest_ours >= draft_size:
        return False, f"the target has token {highest_ours}, but the draft reads only {draft_size:,} tokens"
    if highest_theirs >= target_size:
        return False, f"the draft has token {highest_theirs}, but the target reads only {target_size:,} tokens"
    return True, ""
