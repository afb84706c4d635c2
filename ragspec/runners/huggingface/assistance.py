"""How speculation is put to stock `generate()`: on the drafting model, in the generation config, as arguments."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from ragspec.models.draft import Draft, width_of
from ragspec.records import Sampling

LOOKUP_TOKENS = 10  # transformers' own default


@dataclass(frozen=True, slots=True)
class Speculation:
    """What generate() is told. draft_model: the loaded draft of `draft`. knobs: read from the drafting model.

    on_trial: whether it is left where the first records show that plain decoding is faster. Greedy answers are the same
    either way; sampled ones would depend on a clock, so they go on as they began.
    """

    method: str
    num_tokens: int | None = None
    ngram_max: int | None = None
    early_exit_layer: int | None = None
    schedule: str = "constant"
    confidence_threshold: float | None = None
    knobs: dict[str, Any] = field(default_factory=dict)
    draft: Draft | None = None
    draft_model: Any = None
    on_trial: bool = False


class Assistance:
    """What generate() gets for one target, whose drafting model is set up here."""

    def __init__(self, spec: Speculation, target: Any) -> None:
        self._spec = spec
        self._width = width_of(target.config)
        self._sampling_draft: Any = None  # a copy: universal speculative sampling rewrites the draft's embeddings
        if spec.method != "none":
            self._set_knobs((spec.draft_model if spec.draft else target).generation_config)

    def _set_knobs(self, knobs: Any) -> None:
        """Set the draft's own settings where transformers reads them: on the drafting model's generation_config."""
        spec = self._spec
        knobs.num_assistant_tokens_schedule = spec.schedule
        if spec.num_tokens is not None:
            knobs.num_assistant_tokens = spec.num_tokens
        if spec.confidence_threshold is not None:
            knobs.assistant_confidence_threshold = spec.confidence_threshold
        for name, value in spec.knobs.items():
            setattr(knobs, name, value)

    def forbidden(self, sampling: Sampling, *, shaped: bool) -> str:
        """Return why these settings forbid drafts, "" where they do not. shaped: by a grammar."""
        draft = self._spec.draft
        if shaped and draft is not None and draft.other_tokens:
            return "structured: stock generate() would hold the draft model's own tokens to the grammar"
        if draft is None or not sampling.logit_bias:
            return ""
        if draft.other_tokens or draft.width != self._width:
            # transformers 5.19 hands the target's biases to the draft model, whatever its ids mean
            return "logit_bias: stock generate() would bias the draft model's own tokens"
        return ""

    def configure(self, config: Any) -> None:
        """Ask for drafts in a generation config."""
        if self._spec.method == "prompt_lookup":
            config.prompt_lookup_num_tokens = self._spec.num_tokens or LOOKUP_TOKENS
            config.max_matching_ngram_size = self._spec.ngram_max
        elif self._spec.method == "early_exit":
            config.assistant_early_exit = self._spec.early_exit_layer

    def arguments(self, sampling: Sampling) -> dict[str, Any]:
        """Return the arguments of generate() that name the draft model."""
        draft = self._spec.draft
        if draft is None:
            return {}
        model = self._spec.draft_model
        if draft.other_tokens and sampling.temperature > 0:
            # transformers 5.19 prunes the draft's output layer in place for this, which greedy records must not see
            if self._sampling_draft is None:
                self._sampling_draft = copy.deepcopy(model)
            model = self._sampling_draft
        given: dict[str, Any] = {"assistant_model": model}
        if self._width != draft.width:
            # generate() insists on it if sizes differ; whether it is used is AcceptanceMeter's decision
            given["assistant_tokenizer"] = draft.tokenizer
        return given
