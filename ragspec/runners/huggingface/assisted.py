"""Speculation in stock `generate()`: its arguments, its acceptance counts, and whether it is faster at all.

transformers exposes no acceptance statistics. Its model builds a candidate generator per call; AcceptanceMeter wraps
that object's two methods to count. The same hook decides whether drafts are re-tokenised, which transformers judges by
vocab_size alone (transformers 5.19, `_get_candidate_generator`; see also its issue 29769). Limit: private methods, so
the transformers version has an upper bound.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from ragspec.errors import ModelError
from ragspec.models.draft import Draft, width_of
from ragspec.records import Sampling
from ragspec.speculation.speculation_guard import Savings
from ragspec.stats import SpecStats

RECORDS, MAX_RECORDS = 2, 4  # records compared: at least, and at most if the result stays unclear


@dataclass(slots=True)
class Comparison:
    """Tokens and seconds of the same records, decoded with and without drafts."""

    method: str
    records: int = 0
    tokens: int = 0
    drafted_s: float = 0.0
    plain_tokens: int = 0
    plain_s: float = 0.0
    savings: Savings = field(default_factory=Savings)

    @property
    def done(self) -> bool:
        """Whether enough records were compared."""
        low, high = self.savings.interval
        return self.records >= MAX_RECORDS or (self.records >= RECORDS and (self.slower or low > 1 or high < 1))

    def add(self, tokens: int, drafted_s: float, plain_tokens: int, plain_s: float) -> None:
        """Add one record decoded both ways. Sampled answers may differ in length."""
        self.records += 1
        self.tokens += tokens
        self.drafted_s += drafted_s
        self.plain_tokens += plain_tokens
        self.plain_s += plain_s
        if tokens and plain_tokens:
            self.savings.add(plain_s / plain_tokens * tokens, drafted_s)

    @property
    def slower(self) -> bool:
        """Whether plain decoding is faster, beyond what chance explains in so few records."""
        return self.savings.interval[1] < 1

    def note(self, remedy: str) -> str:
        """Return the note for slower speculation. remedy: what was done or can be done about it."""
        drafted, plain = self.tokens / self.drafted_s, self.plain_tokens / self.plain_s
        return (
            f"{self.method} is slower than plain decoding here: {drafted:.1f} tokens/s against {plain:.1f} (stock "
            f"generate(), the first {self.records} records both ways); {remedy}"
        )


# -- acceptance ------------------------------------------------------------------------------------


class AcceptanceMeter:
    """Counts the drafted and accepted tokens of one `generate()` call at a time, at batch size 1.

    Args:
        tokenizers: (target's, draft's) if the draft has another vocabulary, None if it shares the target's token ids.
        draft_length: Context length of the draft model; a longer row continues without drafts. None: no limit.
        draft_width: Token ids that the draft model embeds; a row with another id continues without drafts. None: all.
    """

    def __init__(
        self,
        tokenizers: tuple[Any, Any] | None = None,
        draft_length: int | None = None,
        draft_width: int | None = None,
    ) -> None:
        self.stats = SpecStats()
        self.outgrown = 0  # rows longer than the draft model's context
        self.unembedded = 0  # rows with a token id that the draft model does not embed
        self._draft_width = draft_width
        self._drafted = 0
        self._tokenizers = tokenizers or (None, None)
        self._draft_length = draft_length

    def attach(self, model: Any) -> None:
        """Wrap every candidate generator that `model` builds from now on. Raises ModelError if it builds none."""
        build = getattr(model, "_get_candidate_generator", None)
        if build is None:
            raise ModelError(
                "this version of transformers is not supported (its candidate generators have moved); "
                "use transformers 5.18 to 5.24"
            )
        target, draft = self._tokenizers
        width = width_of(model.config)

        def build_counted(**kwargs: Any) -> Any:
            generator = build(**{**kwargs, "target_tokenizer": target, "assistant_tokenizer": draft})
            _patch_translator(generator)
            self._count_drafts(generator, width)
            return generator

        model._get_candidate_generator = build_counted

    def start(self) -> None:
        """Reset the counts."""
        self.stats = SpecStats()

    def _count_drafts(self, generator: Any, width: int) -> None:
        get_candidates, update = generator.get_candidates, generator.update_candidate_strategy
        has_room = True
        prompt: tuple[int, int] | None = None  # tokens of the prompt, in the target's and in the draft's count

        def fits(input_ids: Any) -> bool:
            """Return whether the row and another draft fit in the draft model's context."""
            nonlocal prompt
            if self._draft_length is None:
                return True
            if prompt is None:
                prompt = input_ids.shape[1], self._draft_tokens(input_ids)
            length = prompt[1] + self._draft_tokens(input_ids[:, prompt[0] :])
            return length + int(getattr(generator, "num_assistant_tokens", 0)) < self._draft_length

        def counting_candidates(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal has_room
            if has_room and self._draft_width is not None and int(input_ids.max()) >= self._draft_width:
                has_room = False  # the target generated a padding id that the draft does not have
                self.unembedded += 1
            if has_room and not fits(input_ids):
                has_room = False
                self.outgrown += 1
            if not has_room:
                self._drafted = 0
                return input_ids, None
            candidates, logits = get_candidates(input_ids, *args, **kwargs)
            candidates, logits = _fit_to_target(candidates, logits, input_ids.shape[1], width)
            self._drafted = candidates.shape[1] - input_ids.shape[1]
            return candidates, logits

        def counting_update(input_ids: Any, scores: Any, num_matches: Any) -> Any:
            self.stats.record(self._drafted, int(num_matches))
            if has_room:
                update(input_ids, scores, num_matches)

        generator.get_candidates = counting_candidates
        generator.update_candidate_strategy = counting_update

    def _draft_tokens(self, input_ids: Any) -> int:
        """Return the length of a target row in the draft model's tokens."""
        target, draft = self._tokenizers
        if target is None or draft is None:
            return int(input_ids.shape[1])
        return len(draft(target.decode(input_ids[0]), verbose=False)["input_ids"])


def in_id_order(tokenizer: Any) -> Any:
    """Return `tokenizer` with its vocabulary listed by id.

    Universal speculative sampling numbers shared tokens in the order of get_vocab(), then reads the draft's
    probabilities in id order (transformers 5.19). get_vocab() is ordered differently in every process, so without this
    the probabilities belong to other tokens, and one seed gives several answers.
    """
    listed = dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    tokenizer.get_vocab = lambda: dict(listed)
    return tokenizer


def _patch_translator(generator: Any) -> None:
    """Work around transformers 5.19, which looks up pruned tokens even if all of the draft's tokens are shared."""
    translator = getattr(generator, "_atm_translator", None)
    if translator is not None and not hasattr(translator, "assistant_overlap_token_ids"):
        translator.assistant_prune_lm_head = False


def _fit_to_target(candidates: Any, logits: Any, length: int, width: int) -> tuple[Any, Any]:
    """Return the draft cut before the first id that the target lacks, and its logits at the target's width.

    candidates: (1, length + k). logits: (1, k, draft's width) or None. Embeddings of one tokenizer are padded to
    different widths; given that a token is below `width`, the narrowed logits are exactly its distribution.
    """
    beyond = (candidates[0, length:] >= width).nonzero()
    if len(beyond):
        keep = int(beyond[0])
        candidates = candidates[:, : length + keep]
        # with an empty draft, the target samples on its own
        logits = None if logits is None or keep == 0 else logits[:, :keep]
    if logits is None or logits.shape[-1] == width:
        return candidates, logits
    import torch

    narrow = logits[..., :width]
    return candidates, torch.nn.functional.pad(narrow, (0, width - narrow.shape[-1]), value=float("-inf"))


# -- arguments of generate() -----------------------------------------------------------------------
LOOKUP_TOKENS = 10  # transformers' own default
QUANTIZED = "quantized"  # a cache_implementation
UNTOUCHED = (None, "dynamic", "hybrid", QUANTIZED)  # those that drafts leave as they are, or that rule them out


@dataclass(frozen=True, slots=True)
class Speculation:
    """How generate() speculates. draft_model: the loaded model of `draft`. knobs: extra settings of the drafting model.

    on_trial: stop drafting if plain decoding is faster for the first records. Only greedy records may change over,
    since their answers are the same either way; a sampled answer would depend on timing.
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
    """The speculation arguments of generate() for one target. Sets up the drafting model's generation config."""

    def __init__(self, spec: Speculation, target: Any) -> None:
        self._spec = spec
        self._width = width_of(target.config)
        self._sampling_draft: Any = None  # a copy, since universal speculative sampling rewrites the draft's embeddings
        if spec.method != "none":
            # generate() takes what its config leaves open from the model's own
            if target.generation_config.cache_implementation != QUANTIZED:
                _with_growing_cache(target.generation_config)
            if spec.draft_model is not None:
                _with_growing_cache(spec.draft_model.generation_config)
            self._set_knobs((spec.draft_model if spec.draft else target).generation_config)

    def _set_knobs(self, knobs: Any) -> None:
        """Write the draft settings to the drafting model's generation_config, where transformers reads them."""
        spec = self._spec
        knobs.num_assistant_tokens_schedule = spec.schedule
        if spec.num_tokens is not None:
            knobs.num_assistant_tokens = spec.num_tokens
        if spec.confidence_threshold is not None:
            knobs.assistant_confidence_threshold = spec.confidence_threshold
        for name, value in spec.knobs.items():
            setattr(knobs, name, value)

    def no_drafts_reason(self, sampling: Sampling, config: Any, *, shaped: bool) -> str:
        """Return why these settings rule out drafts, or "".

        config: the answer's generation config. shaped: whether the answer has a grammar.
        """
        draft = self._spec.draft
        if self._spec.method == "none":
            return ""
        if config.guidance_scale not in (None, 1):
            # transformers 5.19 keeps a cache for it that no rejected draft leaves, and reads one token a step
            return "guidance_scale: stock generate() would compute other scores with drafts"
        if config.dola_layers is not None:
            return "dola_layers: stock generate() would ignore it with drafts"
        if config.cache_implementation == QUANTIZED:
            return "cache_implementation: stock generate() cannot take a draft back from a quantized cache"
        if shaped and draft is not None and draft.other_tokens:
            return "structured: stock generate() would hold the draft model's own tokens to the grammar"
        if draft is None or not sampling.logit_bias:
            return ""
        if draft.other_tokens or draft.width != self._width:
            # transformers 5.19 applies the target's biases to the draft model's ids
            return "logit_bias: stock generate() would bias the draft model's own tokens"
        return ""

    def configure(self, config: Any) -> None:
        """Enable drafts in a generation config."""
        if self._spec.method == "none":
            return
        _with_growing_cache(config)
        if self._spec.method == "prompt_lookup":
            config.prompt_lookup_num_tokens = self._spec.num_tokens or LOOKUP_TOKENS
            config.max_matching_ngram_size = self._spec.ngram_max
        elif self._spec.method == "early_exit":
            config.assistant_early_exit = self._spec.early_exit_layer

    def arguments(self, sampling: Sampling) -> dict[str, Any]:
        """Return the generate() arguments that pass the draft model."""
        draft = self._spec.draft
        if draft is None:
            return {}
        model = self._spec.draft_model
        if draft.other_tokens and sampling.temperature > 0:
            # transformers 5.19 prunes the draft's output layer in place for this; greedy records need it whole
            if self._sampling_draft is None:
                self._sampling_draft = copy.deepcopy(model)
            model = self._sampling_draft
        given: dict[str, Any] = {"assistant_model": model}
        if self._width != draft.width:
            # generate() requires it if sizes differ; AcceptanceMeter decides whether it is used
            given["assistant_tokenizer"] = draft.tokenizer
        return given


def _with_growing_cache(config: Any) -> None:
    """Let a generation config use the default cache: generate() refuses drafts with none and with a fixed size.

    No answer depends on it.
    """
    config.use_cache = True
    config.cache_implementation = None
