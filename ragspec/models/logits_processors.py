"""Penalties on what an answer has already, as OpenAI and vLLM define them; transformers only has its own, on all text.

    >>> AnswerPenalties(prompt_tokens=3, presence=0.5, frequency=0.2)(input_ids, scores)

It is called as transformers calls its logits processors. Limit: prompts of one width, as in a padded batch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ragspec.errors import ModelError
from ragspec.models.draft import width_of
from ragspec.records import Sampling, TokenLogprob
from ragspec.structured.grammars import Matcher


class AnswerPenalties:
    """Takes `presence` off the score of each token of the answer, and `frequency` once for every time it is there."""

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, (rows, vocab), after `input_ids`, (rows, tokens): the prompt and the answer so far."""
        rows, width = scores.shape
        # a draft model's output layer may be narrower than its vocabulary (transformers prunes it): one more column
        answer = input_ids[:, self._prompt_tokens :].clamp(max=width)
        counts = scores.new_zeros(rows, width + 1)
        counts.scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        changed = torch.nn.functional.pad(scores, (0, 1))
        there = changed.gather(1, answer) - self._frequency * counts.gather(1, answer) - self._presence
        return changed.scatter_(1, answer, there)[:, :width]


# -- grammars as a logits processor of transformers: what stock generate() and the audit hold answers to --------------
#
#     >>> GrammarMasks([grammars.matcher(text)], prompt_tokens=12)(input_ids, scores)
#
# Where an answer is in its grammar follows from its tokens alone, so assisted generation, which asks about drafts and
# then goes back, gets the right masks too. Limit: prompts of one width, as in a padded batch.


class GrammarFollower:
    """One answer's grammar, moved to wherever its tokens say."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._taken: list[int] = []

    def mask(self, answer: Sequence[int]) -> torch.Tensor | None:
        """Return which tokens may follow `answer`, (vocabulary,) of bool; None where the grammar refuses the answer."""
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        inner, wanted = self._matcher.inner, self._matcher.before_end(answer)
        pairs = zip(self._taken, wanted, strict=False)
        same = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(self._taken), len(wanted)))
        if same < len(self._taken):
            inner.rollback(len(self._taken) - same)
            del self._taken[same:]
        rest = wanted[same:]
        if inner.validate_tokens(rest) < len(rest):
            return None
        inner.consume_tokens(rest)
        self._taken += rest
        mask = allocate_token_bitmask(1, self._matcher.width)
        fill_next_token_bitmask(inner, mask)
        return torch.from_numpy(np.unpackbits(mask[0].view(np.uint8), bitorder="little").astype(bool))

    def masked(self, logits: torch.Tensor, answer: Sequence[int]) -> torch.Tensor:
        """Return the logits, (vocab,), with minus infinity for what may not follow `answer`."""
        mask = self.mask(answer)
        return logits if mask is None else logits.masked_fill(~mask[: len(logits)].to(logits.device), float("-inf"))

    def copy(self) -> GrammarFollower:
        """Return another that stands where this one does."""
        copied = GrammarFollower(self._matcher.copy())
        copied._taken = list(self._taken)
        return copied


class GrammarMasks:
    """The processor of a batch. matchers: of its rows, None for one that may write anything."""

    def __init__(self, matchers: Sequence[Matcher | None], prompt_tokens: int) -> None:
        self._rows = [None if matcher is None else GrammarFollower(matcher) for matcher in matchers]
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, (rows, vocab), after `input_ids`, (rows, tokens); a beam's rows are neighbours."""
        answers = input_ids[:, self._prompt_tokens :].tolist()
        beams = max(1, len(answers) // len(self._rows))
        rows = [self._rows[at // beams] for at in range(len(answers))]
        masked = [
            own if row is None else row.masked(own, answer)
            for row, own, answer in zip(rows, scores, answers, strict=True)
        ]
        return torch.stack(masked)

    def __deepcopy__(self, memo: Any) -> GrammarMasks:
        """A draft model gets processors of its own."""
        copied = GrammarMasks([], self._prompt_tokens)
        copied._rows = [None if row is None else row.copy() for row in self._rows]
        return copied


# -- how likely a model found the tokens of an answer -----------------------------------------------------------------


def token_logprobs(logits: torch.Tensor, chosen: Sequence[int], most: int) -> list[TokenLogprob]:
    """Return how likely each of the `chosen` tokens was, beside the `most` likeliest ones.

    logits: (n, vocab), the model's own, nothing added or taken off; row i is what chosen[i] was chosen from.
    """
    logs = torch.log_softmax(logits[: len(chosen)].float(), dim=-1)
    own = logs.gather(1, torch.tensor(chosen, dtype=torch.long, device=logs.device)[:, None]).squeeze(1)
    best = logs.topk(min(most, logs.shape[1]))
    told = zip(own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenLogprob(value, tuple(zip(ids, values, strict=True))) for value, ids, values in told]


def generated_logprobs(output: Any, row: int, chosen: list[int], most: int | None) -> tuple[TokenLogprob, ...]:
    """Return how likely the tokens of one row of a generate() call were; nothing where `most` is None.

    output: what generate() returned. Its logits are one (rows, vocab) per token, with a row per beam where it searched.
    """
    if most is None or not chosen:
        return ()
    beams = getattr(output, "beam_indices", None)
    rows = [row] * len(chosen) if beams is None else beams[row].tolist()
    logits = torch.stack([step[at] for step, at, _ in zip(output.logits, rows, chosen, strict=False)])
    return tuple(token_logprobs(logits, chosen, most))


# -- what a model's own generation_config asks for, and how it turns logits into choices, as generate() would ---------
#
# The keys of the config's `sampling` section decide, set or not; whatever else a model asks for (no_repeat_ngram_size,
# suppress_tokens, min_length, ...) is done with transformers' own processors, in transformers' own order.
# Source: transformers 5.19, generation/utils.py. Limit: one sequence at a time, no beams.


# keys of generation_config -> those of `sampling`, which decide in their place
OVERRIDDEN = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
# what the processors do: these keys change logits, and nothing else
SERVED = (
    "sequence_bias", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "renormalize_logits",
    "eos_token_id", "pad_token_id", "bos_token_id",
)  # fmt: skip
# what only generate() itself does
STOCK_ONLY = (
    "num_beams", "num_beam_groups", "num_return_sequences", "penalty_alpha", "dola_layers", "diversity_penalty",
    "constraints", "force_words_ids", "guidance_scale", "token_healing", "watermarking_config", "stop_strings",
    "max_time", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "cache_implementation", "use_mtp",
)  # fmt: skip
NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, 0.0, 1.0, "hybrid", "dynamic", [], {})
# processors that look at nothing but the logits before them, as do biases of single tokens
BY_LOGITS = {
    "InfNanRemoveLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper",
    "EtaLogitsWarper", "LogitNormalization",
}  # fmt: skip


def asked_beyond_sampling(path: str, revision: str | None = None) -> list[str]:
    """Return the keys of a model's generation_config.json that change answers and are not the `sampling` section's."""
    from transformers import GenerationConfig

    try:
        own = GenerationConfig.from_pretrained(path, revision=revision or "main").to_dict()
    except OSError:
        return []  # it has none
    known = {*SERVED, *STOCK_ONLY} - {"eos_token_id", "pad_token_id", "bos_token_id"}
    return sorted(key for key in known if own.get(key) not in NEUTRAL)


class GenerationRules:
    """How one model's logits become choices.

    eos: ids that end an answer. pad: the padding id. given: `generate_args`, which win over the model's own.
    """

    def __init__(self, model: Any, eos: frozenset[int], pad: int, given: Mapping[str, Any] | None = None) -> None:
        self._model = model
        self._eos = eos
        self.pad = pad
        self._given = dict(given or {})
        self._known: dict[Sampling, bool] = {}

    def config(self, sampling: Sampling) -> Any:
        """Return the GenerationConfig of an answer."""
        config = copy.deepcopy(self._model.generation_config)
        config.max_length = None
        config.max_new_tokens = sampling.max_new_tokens
        # for None, transformers takes the model's own: an id that no token has stands for no end
        none = [width_of(self._model.config)] if self._eos else None
        config.eos_token_id = sorted(sampling.ends(self._eos)) or none
        config.pad_token_id = self.pad
        config.do_sample = sampling.temperature > 0
        config.repetition_penalty = sampling.repetition_penalty
        greedy = not config.do_sample
        config.temperature = None if greedy else sampling.temperature
        config.top_p = None if greedy else sampling.top_p
        config.top_k = None if greedy else sampling.top_k
        own = self._model.generation_config.min_p  # transformers takes it if ours is None
        config.min_p = sampling.min_p or (None if greedy or own is None else 0.0)
        for name, value in self._given.items():
            setattr(config, name, value)
        if sampling.min_new_tokens:
            config.min_new_tokens = sampling.min_new_tokens
        if sampling.logit_bias:
            config.sequence_bias = _with_bias(config.sequence_bias, sampling.logit_bias)
        return config

    def penalties(self, sampling: Sampling, prompt_tokens: int) -> list[AnswerPenalties]:
        """Return the processors that transformers does not have: it applies them after those of its config."""
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        return [AnswerPenalties(prompt_tokens, presence, frequency)] if presence or frequency else []

    def refusal(self, sampling: Sampling) -> str:
        """Return which setting the model has no place for; "" if there is none."""
        width = width_of(self._model.config)
        named = {"logit_bias": [token for token, _ in sampling.logit_bias], "stop_token_ids": sampling.stop_token_ids}
        for key, tokens in named.items():
            if (beyond := next((token for token in tokens if not 0 <= token < width), None)) is not None:
                return f"{key}: the model has no token {beyond}, only 0 to {width - 1}"
        return ""

    def processors(self, sampling: Sampling, prompt_tokens: int) -> Processors | None:
        """Return what an answer's logits go through; None if nothing changes them."""
        kind = replace(sampling, seed=0)  # a record may have a seed of its own
        if self._known.get(kind) is False:
            return None
        model = self._model
        try:
            config, _ = model._prepare_generation_config(self.config(sampling))
            model._prepare_special_tokens(config, True, device=model.device)
            config.max_length = prompt_tokens + sampling.max_new_tokens
            if config.min_new_tokens is not None:
                config.min_length = config.min_new_tokens + prompt_tokens
            found = model._get_logits_processor(
                config,
                input_ids_seq_length=prompt_tokens,
                device=model.device,
                logits_processor=self.penalties(sampling, prompt_tokens),
            )
        except AttributeError as error:
            raise ModelError(
                f"this version of transformers is not supported ({error}); use transformers 5.18 to 5.24"
            ) from error
        # which ones there are depends only on the sampling
        self._known[kind] = bool(found)
        return Processors(found) if found else None

    def depends_on_prompt(self, sampling: Sampling) -> bool:
        """Return whether a choice depends on the prompt other than through its logits: padding would change it."""
        processors = self.processors(sampling, 1)
        return processors is not None and not all(isinstance(one, AnswerPenalties) for one in processors.by_text)

    def only_stock(self) -> str:
        """Return the key of the model's generation_config that only generate() supports; "" if there is none."""
        own = self._model.generation_config.to_dict() | self._given
        return next((key for key in STOCK_ONLY if own.get(key) not in NEUTRAL), "")

    def overridden(self, sampling: Sampling) -> str:
        """Return in words how the model's own sampling differs from the config's; "" if it does not."""
        own = self._model.generation_config.to_dict()
        greedy = sampling.temperature == 0
        parts = []
        if own.get("do_sample") and greedy:
            parts.append("sampling instead of greedy decoding")
        for theirs, ours in OVERRIDDEN.items():
            value = own.get(theirs)
            if value is None or value == getattr(sampling, ours) or (greedy and theirs != "repetition_penalty"):
                continue
            if theirs in ("top_k", "min_p") and not value:
                continue
            parts.append(f"{theirs} {value}")
        return ", ".join(parts)


def _with_bias(own: Any, added: Sequence[tuple[int, float]]) -> list[list[Any]]:
    """Return a `sequence_bias`, which comes before all penalties, with the biases of single tokens added."""
    biases = {tuple(ids): bias for ids, bias in (own.items() if isinstance(own, dict) else own or ())}
    for token, bias in added:
        biases[(token,)] = biases.get((token,), 0.0) + float(bias)
    return [[list(ids), bias] for ids, bias in biases.items()]


def _by_logits(processor: Any) -> bool:
    """Return whether a processor looks at nothing but logits."""
    if type(processor).__name__ == "SequenceBiasLogitsProcessor":
        return all(len(ids) == 1 for ids in processor.sequence_bias)
    return type(processor).__name__ in BY_LOGITS


class Processors:
    """The logits processors of one answer, in order."""

    def __init__(self, processors: Sequence[Any]) -> None:
        self._processors = processors

    @cached_property
    def by_text(self) -> list[Any]:
        """Those that look at the tokens before."""
        return [one for one in self._processors if not _by_logits(one)]

    def __call__(self, logits: torch.Tensor, tokens: list[int], draft: Sequence[int] = ()) -> torch.Tensor:
        """Return the processed logits, (k + 1, vocab): row i follows `tokens` and the first i of `draft`."""
        if not self.by_text:
            return self._apply(logits, torch.tensor([tokens[-1:]], device=logits.device))
        text = torch.tensor([[*tokens, *draft]], device=logits.device)
        rows = [self._apply(logits[i : i + 1], text[:, : len(tokens) + i]) for i in range(len(draft) + 1)]
        return torch.cat(rows)

    def _apply(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for processor in self._processors:
            logits = processor(ids, logits)
        return logits
