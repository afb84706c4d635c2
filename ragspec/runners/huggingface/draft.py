"""The draft model beside a target: found before any weights, loaded, and what stands between their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragspec.config.secret import revealed
from ragspec.config.sections import SpeculationConfig
from ragspec.runners.huggingface.args import Args

if TYPE_CHECKING:
    from ragspec.models.draft import Draft
    from ragspec.models.translation import Translation
    from ragspec.runners.huggingface.checkpoint import Checkpoint

ARGS_KEY = "speculation.draft_model_args"


def find(spec: SpeculationConfig, model_name: str, target: Checkpoint, notes: list[str]) -> Draft:
    """Return where the draft is and how its tokens relate to the target's. Raises ConfigError."""
    from ragspec.models.draft import DRAFT_KEY, find_draft, width_of
    from ragspec.models.weights import check_weights

    draft = find_draft(
        spec.draft_model or "",
        spec.draft_tokenizer,
        (model_name, target.tokenizer.inner, width_of(target.config)),
        trust_remote_code=spec.draft_trust_remote_code,
        remedy="for universal assisted decoding",
    )
    check_weights(
        draft.source,
        draft.config,
        key=DRAFT_KEY,
        args_key=ARGS_KEY,
        trust_remote_code=spec.draft_trust_remote_code,
        extra=revealed(spec.draft_model_args),
    )
    if draft.remark:
        notes.append(draft.remark)
    if spec.draft_tokenizer and not draft.other_tokens:
        notes.append(
            "speculation.draft_tokenizer: not needed; target and draft share their tokens, "
            "so drafts need no re-tokenising"
        )
    return draft


def load_draft(draft: Draft, spec: SpeculationConfig, args: Args) -> Any:
    """Return the draft with its weights, on the target's device and in its dtype. Raises ModelError."""
    from ragspec.runners.huggingface.checkpoint import load

    extra = revealed(spec.draft_model_args)
    return load(draft.source, args, extra, None, spec.draft_trust_remote_code, ARGS_KEY)


def translation(draft: Draft, draft_model: Any, target: Checkpoint) -> Translation | None:
    """Return what stands between the draft's tokens and the target's; None where they are the same."""
    from ragspec.models.stopping import end_tokens
    from ragspec.models.translation import Translation

    if not draft.other_tokens:
        return None
    tokenizer, ends = target.tokenizer.inner, target.ends
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else min(ends, default=None)
    return Translation(tokenizer, draft.tokenizer, end_tokens(draft_model, draft.tokenizer, {}), end)
