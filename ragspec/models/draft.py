"""Find a draft model and check, before weights load, whether its vocabulary fits the target's.

Token maps are compared. transformers and vLLM compare only sizes: two unrelated tokenizers of the same size pass, and
every draft is rejected; one tokenizer with two paddings fails, and is re-tokenised at every step for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ragspec.errors import ConfigError
from ragspec.models.resolve import ModelSource, context_length, read_model_config, resolve
from ragspec.models.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class VocabularyMatch:
    """Comparison of two token maps. `shared` ids mean the same token in both; `differing` ids do not."""

    shared: int
    differing: int
    example: str  # the first difference in words, "" without one

    @property
    def same(self) -> bool:
        """Return whether every id in both maps means the same token."""
        return self.differing == 0 and self.shared > 0


def compare(target: Any, draft: Any) -> VocabularyMatch:
    """Return the comparison of two transformers tokenizers' token maps."""
    ours = {i: token for token, i in target.get_vocab().items()}
    theirs = {i: token for token, i in draft.get_vocab().items()}
    common = ours.keys() & theirs.keys()
    differing = sorted(i for i in common if ours[i] != theirs[i])
    first = differing[0] if differing else None
    example = "" if first is None else f"token {first} is {ours[first]!r} in the target, {theirs[first]!r} in the draft"
    return VocabularyMatch(len(common) - len(differing), len(differing), example)


def fits(target: Any, target_size: int, draft: Any, draft_size: int) -> tuple[bool, str]:
    """Return whether the target can take the draft's token ids unchanged and, if not, the reason.

    target_size, draft_size: rows of the models' embeddings. The draft must be able to read every target token and have
    no tokens that the target cannot read.
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


# -- finding a draft -------------------------------------------------------------------------------

DRAFT_KEY = "speculation.draft_model"
DRAFT_TRUST_KEY = "speculation.draft_trust_remote_code"
PROBE = "The answer is 42: yes, Dr. Smith's."  # a text that any language model's tokenizer can represent


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model, and how its tokens relate to the target's."""

    source: ModelSource
    config: Any
    tokenizer: Any
    context_length: int | None
    width: int  # rows of its embeddings
    other_tokens: bool  # its ids mean other tokens than the target's
    remark: str = ""  # a note for the user


def width_of(config: Any) -> int:
    """Return the rows of a model's embeddings: vocabulary plus padding."""
    return int(config.get_text_config().vocab_size)


def find_draft(
    name: str,
    tokenizer_name: str | None,
    target: tuple[str, Any, int],
    *,
    trust_remote_code: bool,
    remedy: str,
    trust_key: str = DRAFT_TRUST_KEY,
) -> Draft:
    """Return the draft model `name`.

    Args:
        name: the draft model.
        tokenizer_name: the config's `draft_tokenizer`, which allows a draft with other tokens.
        target: the target's name, tokenizer and embedding rows.
        trust_remote_code: the draft's own code may run.
        remedy: what a draft_tokenizer would do on this runner, for the message.
        trust_key: the config key that allows the draft's own code, for the message.

    Raises:
        ConfigError: the draft is missing, or has other tokens without a `draft_tokenizer`.
    """
    key = DRAFT_KEY
    source = resolve(name, key=key)
    config = read_model_config(source, trust_remote_code=trust_remote_code, key=key, trust_key=trust_key)
    tokenizer_source = source
    if tokenizer_name and tokenizer_name != name:
        key = "speculation.draft_tokenizer"
        tokenizer_source = resolve(tokenizer_name, key=key)
    tokenizer = load_tokenizer(tokenizer_source, key=key, trust_remote_code=trust_remote_code, trust_key=trust_key)
    target_name, target_tokenizer, target_width = target
    fit, why = fits(target_tokenizer, target_width, tokenizer, width_of(config))
    if not fit and not tokenizer_name:
        raise ConfigError(
            f'speculation.draft_model: the tokenizer of "{name}" differs from that of "{target_name}" ({why}); '
            f"add `draft_tokenizer: {name}` {remedy}, choose a draft of the same family, or use method: prompt_lookup"
        )
    remark = "" if fit else _remark(tokenizer, tokenizer_name)
    return Draft(source, config, tokenizer, context_length(config), width_of(config), not fit, remark)


def _remark(tokenizer: Any, name: str | None) -> str:
    """Return a note if a text changes in the draft's tokens, "" if it does not.

    Raises ConfigError if no word of it survives.
    """
    ids = tokenizer(PROBE, add_special_tokens=False, verbose=False)["input_ids"]
    written = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if written == PROBE:
        return ""
    kept = {word for word in PROBE.lower().split() if word in written.lower()}
    if not kept:
        raise ConfigError(
            f'speculation.draft_tokenizer: "{name}" cannot write plain text ("{PROBE}" becomes "{written}"), so no '
            "draft of it could be right; choose another draft"
        )
    return (
        f'speculation.draft_tokenizer: "{name}" changes texts ("{PROBE}" becomes "{written}"): where it does, drafts '
        "are wrong"
    )
