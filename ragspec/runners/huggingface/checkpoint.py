"""The target and draft models of a run in transformers: resolve and read tokenizers first, load weights later.

The runner, the audit and the training of drafts all load models here, so they compute with the same one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ragspec.config.redaction import revealed
from ragspec.config.sections import SpeculationConfig
from ragspec.errors import ConfigError
from ragspec.host.collection import collection_paused
from ragspec.models.draft import width_of
from ragspec.models.loading import load_model, pick_device
from ragspec.models.resolve import ModelSource, context_length, read_model_config, resolve
from ragspec.models.tokenizer import HFTokenizer, load_tokenizer
from ragspec.runners.huggingface.args import Args

if TYPE_CHECKING:
    from ragspec.models.draft import Draft
    from ragspec.models.logits_processors import GenerationRules
    from ragspec.models.translation import Translation
    from ragspec.structured.grammars import Grammars


class Checkpoint:
    """The target model.

    Args:
        name: As in the config.
        args: The config's `runner_args`.

    Raises:
        ConfigError: If the model is not there, or is not a causal language model.

    Attributes `ends` (token ids that end an answer) and `rules` (how logits become choices) are set by load().
    """

    rules: GenerationRules

    def __init__(self, name: str, args: Args) -> None:
        self._args = args
        self.trust_remote_code = args.trust_remote_code
        self.source = resolve(name, args.revision)
        self.config = read_model_config(self.source, trust_remote_code=args.trust_remote_code)
        if self.config.is_encoder_decoder:
            raise ConfigError(f'model: "{name}" is an encoder-decoder; ragspec runs causal language models')
        tokenizer = load_tokenizer(
            self.source, trust_remote_code=args.trust_remote_code, extra=revealed(args.tokenizer_args)
        )
        self.tokenizer = HFTokenizer(tokenizer, revealed(args.encode_args), width_of(self.config))
        self.context_length = context_length(self.config)
        self.ends: frozenset[int] = frozenset()
        self._grammars: Grammars | None = None

    def check_weights(self) -> list[str]:
        """Return notes on the weights. Raises ConfigError if they are incomplete or not a causal language model's."""
        from ragspec.models.checks import check_weights

        args = self._args
        extra = revealed(args.model_args)
        return check_weights(self.source, self.config, trust_remote_code=args.trust_remote_code, extra=extra)

    def caveats(self, stops: Collection[int] = ()) -> list[str]:
        """Return notes on the model. stops: further token ids that end answers. Raises ConfigError."""
        from ragspec.models.checks import model_notes

        return model_notes(self.source, self.config, self.tokenizer, revealed(self._args.generate_args), stops=stops)

    @collection_paused()
    def load(self) -> Any:
        """Return the model, ready to generate. Raises ModelError."""
        from ragspec.models.logits_processors import GenerationRules
        from ragspec.models.stopping import end_tokens

        args, given = self._args, revealed(self._args.generate_args)
        model = load(self.source, args, revealed(args.model_args), args.trust_remote_code)
        self.ends = self.tokenizer.ends = end_tokens(model, self.tokenizer.inner, given)
        pad = self.tokenizer.inner.pad_token_id
        self.rules = GenerationRules(model, self.ends, min(self.ends, default=0) if pad is None else pad, given)
        self._grammars = None
        return model

    def forget(self) -> None:
        """Drop the model, which the rules keep alive."""
        del self.rules

    def grammars(self) -> Grammars:
        """Return the tokenizer's grammars; works before weights load. Raises ConfigError if it supports none."""
        from ragspec.structured.grammars import Grammars

        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer.inner, width_of(self.config), self.ends)
        return self._grammars


def load(
    source: ModelSource,
    args: Args,
    extra: dict[str, Any],
    trust: bool,
    args_key: str = "runner_args.model_args",
) -> Any:
    """Return the model of `source` on the device and in the dtype of `args`. Raises ModelError.

    extra: its from_pretrained arguments, given under `args_key` in the config.
    """
    return load_model(
        source,
        device=pick_device(args.device, args.num_gpus),
        dtype=args.dtype,
        num_gpus=args.num_gpus,
        trust_remote_code=trust,
        extra=extra,
        args_key=args_key,
    )


# -- draft model -----------------------------------------------------------------------------------


ARGS_KEY = "speculation.draft_model_args"


def find(spec: SpeculationConfig, model_name: str, target: Checkpoint, notes: list[str]) -> Draft:
    """Resolve the draft and compare its tokens with the target's. Raises ConfigError."""
    from ragspec.models.checks import check_weights
    from ragspec.models.draft import DRAFT_KEY, find_draft, width_of

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
    """Return the draft model, on the target's (first) device and in its dtype. Raises ModelError."""
    extra = revealed(spec.draft_model_args)
    if (args.num_gpus or 0) > 1:  # a model on one device has graphs, and nothing is moved between its layers
        args = args.model_copy(update={"num_gpus": 1})
    return load(draft.source, args, extra, spec.draft_trust_remote_code, ARGS_KEY)


def translation(draft: Draft, draft_model: Any, target: Checkpoint) -> Translation | None:
    """Return the mapping between the draft's tokens and the target's; None if they are the same."""
    from ragspec.models.stopping import end_tokens
    from ragspec.models.translation import Translation

    if not draft.other_tokens:
        return None
    tokenizer, ends = target.tokenizer.inner, target.ends
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else min(ends, default=None)
    return Translation(tokenizer, draft.tokenizer, end_tokens(draft_model, draft.tokenizer, {}), end)
