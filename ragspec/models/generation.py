"""What a model's own generation_config asks for, and how it turns logits into choices, as generate() would.

The keys of the config's `sampling` section decide, set or not; whatever else a model asks for (no_repeat_ngram_size,
suppress_tokens, min_length, ...) is done with transformers' own processors, in transformers' own order.
Source: transformers 5.19, generation/utils.py. Limit: one sequence at a time, no beams.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from ragspec.errors import ModelError
from ragspec.models.draft import width_of
from ragspec.models.penalties import AnswerPenalties
from ragspec.records import Sampling

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
