"""Logits processors: penalties, grammar masks, and a model's generation_config applied as generate() would.

    >>> AnswerPenalties(prompt_tokens=3, presence=0.5, frequency=0.2)(input_ids, scores)

The config's `sampling` section overrides the model's generation_config; what else that asks for (no_repeat_ngram_size,
suppress_tokens, min_length, ...) goes through transformers' processors, in transformers' order.
Source: transformers 5.19, generation/utils.py. Limits: prompts of one width, as in a padded batch; no beams.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from ragspec.errors import ModelError, RecordError, flat
from ragspec.models.draft import width_of
from ragspec.records import Sampling, TokenLogprob
from ragspec.structured.grammars import Matcher


class AnswerPenalties:
    """OpenAI's and vLLM's penalties, which count the answer only; transformers' own also counts the prompt.

    Subtracts `presence` from the score of every token in the answer, and `frequency` times its number of occurrences.
    """

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores (rows, vocab) after input_ids (rows, tokens), the prompt and the answer so far."""
        rows, width = scores.shape
        # a draft's output layer may be narrower than its vocabulary (transformers prunes it): one extra column
        answer = input_ids[:, self._prompt_tokens :].clamp(max=width)
        counts = scores.new_zeros(rows, width + 1)
        counts.scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return self.less(torch.nn.functional.pad(scores, (0, 1)), answer, counts.gather(1, answer))[:, :width]

    def less(self, scores: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return scores (rows, vocab) after `tokens`, (rows, n), that the answer has `counts` times, (rows, n)."""
        there = scores.gather(1, tokens) - self._frequency * counts - self._presence * (counts > 0)
        return scores.scatter(1, tokens, there)


# -- grammar masks ---------------------------------------------------------------------------------


Row = TypeVar("Row")
NO_NUMBERS = (
    "the model's logits are not numbers (NaN): it overflows with this prompt; runner_args.dtype: bfloat16 or float32 "
    "has more range than float16"
)


class NotNumbers(RecordError):
    """Logits of a record are not numbers."""


class OnlyNumbers:
    """Raises NotNumbers for logits with a NaN, of which generate() takes token after token without a word."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if bool(scores.amax(-1).isnan().any()):
            raise NotNumbers(NO_NUMBERS)
        return scores


class GrammarFollower:
    """One answer's grammar, moved to the state that its tokens imply."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._taken: list[int] = []

    def mask(self, answer: Sequence[int]) -> torch.Tensor | None:
        """Return the tokens that may follow `answer`, bool (vocab,); None if the grammar refuses the answer."""
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
        """Return logits (vocab,) with minus infinity for tokens that may not follow `answer`."""
        mask = self.mask(answer)
        return logits if mask is None else logits.masked_fill(~mask[: len(logits)].to(logits.device), float("-inf"))

    def copy(self) -> GrammarFollower:
        """Return a copy in the same state."""
        copied = GrammarFollower(self._matcher.copy())
        copied._taken = list(self._taken)
        return copied


def answers_by_row(input_ids: torch.Tensor, prompt_tokens: int, rows: Sequence[Row]) -> list[tuple[Row, list[int]]]:
    """Return the answers in input_ids, (rows or their beams, tokens), each with its row; beams of one are adjacent."""
    answers = input_ids[:, prompt_tokens:].tolist()
    beams = max(1, len(answers) // len(rows))
    return [(rows[at // beams], answer) for at, answer in enumerate(answers)]


class GrammarMasks:
    """A batch's grammars as a processor of stock generate() and the audit. matchers: one per row, None for free text.

        >>> GrammarMasks([grammars.matcher(text)], prompt_tokens=12)(input_ids, scores)

    The state follows from the answer's tokens alone, so assisted generation, which looks ahead at drafts and then goes
    back, gets the right masks too.
    """

    def __init__(self, matchers: Sequence[Matcher | None], prompt_tokens: int) -> None:
        self._rows = [None if matcher is None else GrammarFollower(matcher) for matcher in matchers]
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores (rows, vocab) after input_ids (rows, tokens). The rows of one prompt's beams are adjacent."""
        answers = answers_by_row(input_ids, self._prompt_tokens, self._rows)
        masked = [
            own if row is None else row.masked(own, answer) for (row, answer), own in zip(answers, scores, strict=True)
        ]
        return torch.stack(masked)

    def __deepcopy__(self, memo: Any) -> GrammarMasks:
        """Return an independent copy, for a draft model."""
        copied = GrammarMasks([], self._prompt_tokens)
        copied._rows = [None if row is None else row.copy() for row in self._rows]
        return copied


# -- logprobs --------------------------------------------------------------------------------------


def token_logprobs(logits: torch.Tensor, chosen: Sequence[int], most: int) -> list[TokenLogprob]:
    """Return the logprob of each token in `chosen`, with the `most` likeliest tokens at its position.

    logits: (n, vocab), the model's unmodified ones; row i belongs to chosen[i].
    """
    logs = torch.log_softmax(logits[: len(chosen)].float(), dim=-1)
    own = logs.gather(1, torch.tensor(chosen, dtype=torch.long, device=logs.device)[:, None]).squeeze(1)
    best = logs.topk(min(most, logs.shape[1]))
    rows = zip(own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenLogprob(value, tuple(zip(ids, values, strict=True))) for value, ids, values in rows]


def generated_logprobs(output: Any, row: int, chosen: list[int], most: int | None) -> tuple[TokenLogprob, ...]:
    """Return the logprobs of one row of a generate() call, () if `most` is None.

    output: of generate(). Its logits are (rows, vocab) per token, with a row per beam under beam search.
    """
    if most is None or not chosen:
        return ()
    beams = getattr(output, "beam_indices", None)
    rows = [row] * len(chosen) if beams is None else beams[row].tolist()
    logits = torch.stack([step[at] for step, at, _ in zip(output.logits, rows, chosen, strict=False)])
    return tuple(token_logprobs(logits, chosen, most))


# -- generation_config -----------------------------------------------------------------------------

# keys of generation_config that those of `sampling` override
OVERRIDDEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# keys that the processors implement: they change logits and nothing else
SERVED = (
    "sequence_bias", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "renormalize_logits",
    "eos_token_id", "pad_token_id", "bos_token_id",
)  # fmt: skip
# keys that only generate() itself implements
STOCK_ONLY = (
    "token_healing", "num_beams", "num_beam_groups", "penalty_alpha", "dola_layers", "diversity_penalty",
    "constraints", "force_words_ids", "guidance_scale", "watermarking_config", "stop_strings", "max_time",
    "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "cache_implementation", "use_mtp",
)  # fmt: skip
# values that ask for nothing, beside None, False and empty ones; for other keys, 0 and 1 may be token ids
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "guidance_scale", "encoder_repetition_penalty", "typical_p"), (1,)
    ),
    "cache_implementation": ("dynamic", "hybrid"),
}
# processors that depend only on the current logits, as biases of single tokens do
BY_LOGITS = {
    "InfNanRemoveLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper",
    "EtaLogitsWarper", "LogitNormalization",
}  # fmt: skip
REPETITION = "RepetitionPenaltyLogitsProcessor"  # depends on the tokens that a text has


def asked_beyond_sampling(path: str, revision: str | None = None) -> list[str]:
    """Return the keys of a model's generation_config.json that change answers and that `sampling` does not override."""
    from transformers import GenerationConfig

    try:
        own = GenerationConfig.from_pretrained(path, revision=revision or "main").to_dict()
    except (OSError, TypeError):
        return []  # no such file, or no object in it
    known = {*SERVED, *STOCK_ONLY} - {"eos_token_id", "pad_token_id", "bos_token_id"}
    return sorted(key for key in known if _asks(key, own.get(key)))


def _asks(key: str, value: Any) -> bool:
    """Return whether a value of a key of generation_config changes anything."""
    return value is not None and value is not False and value not in ([], {}, *NEUTRAL.get(key, ()))


class GenerationRules:
    """How a model's logits become choices.

    eos: ids that end an answer. pad: the padding id. given: `generate_args`, which override the model's own settings.
    """

    def __init__(self, model: Any, eos: frozenset[int], pad: int, given: Mapping[str, Any] | None = None) -> None:
        self._model = model
        self._eos = eos
        self.pad = pad
        self._given = dict(given or {})
        self._known: dict[Sampling, bool] = {}

    def config(self, sampling: Sampling) -> Any:
        """Return the GenerationConfig for an answer."""
        config = copy.deepcopy(self._model.generation_config)
        config.max_length = None
        config.max_new_tokens = sampling.max_new_tokens
        config.num_return_sequences = 1  # a record has one answer
        # None would mean the model's own: an id beyond the vocabulary stands for no end token
        none = None if self._model.generation_config.eos_token_id is None else [width_of(self._model.config)]
        config.eos_token_id = sorted(sampling.ends(self._eos)) or none
        config.pad_token_id = self.pad
        config.do_sample = sampling.temperature > 0
        config.repetition_penalty = sampling.repetition_penalty
        greedy = not config.do_sample
        config.temperature = None if greedy else sampling.temperature
        config.top_p = None if greedy else sampling.top_p
        config.top_k = None if greedy else sampling.top_k
        own = self._model.generation_config.min_p  # transformers uses it if ours is None
        config.min_p = sampling.min_p or (None if greedy or own is None else 0.0)
        for name, value in self._given.items():
            if name != "eos_token_id":  # in self._eos already
                setattr(config, name, value)
        if config.exponential_decay_length_penalty and not sampling.ends(self._eos):
            # it makes an end token likelier, and fails without one; generate() would take the model's own for None
            config.exponential_decay_length_penalty = (sampling.max_new_tokens, 1.0)  # begins beyond the answer
        if sampling.min_new_tokens:
            config.min_new_tokens = sampling.min_new_tokens
        if sampling.logit_bias:
            config.sequence_bias = _with_bias(config.sequence_bias, sampling.logit_bias)
        return config

    def penalties(self, sampling: Sampling, prompt_tokens: int) -> list[AnswerPenalties]:
        """Return the processors that transformers lacks; it applies them after its own."""
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        return [AnswerPenalties(prompt_tokens, presence, frequency)] if presence or frequency else []

    def refusal(self, sampling: Sampling) -> str:
        """Return a message about a token id that the model lacks, "" if there is none."""
        width = width_of(self._model.config)
        named = {"logit_bias": [token for token, _ in sampling.logit_bias], "stop_token_ids": sampling.stop_token_ids}
        for key, tokens in named.items():
            if (beyond := next((token for token in tokens if not 0 <= token < width), None)) is not None:
                return f"{key}: the model has no token {beyond}, only 0 to {width - 1}"
        return ""

    def processors(self, sampling: Sampling, prompt_tokens: int) -> Processors | None:
        """Return the processors of an answer's logits, None if nothing changes them. Raises ModelError."""
        kind = replace(sampling, seed=0)  # the seed does not matter here
        if self._known.get(kind) is False:
            return None
        if kind not in self._known:
            self._try_out(kind)
        found = self._made(sampling, prompt_tokens, self._model.device)
        # which processors exist depends only on the sampling
        self._known[kind] = bool(found)
        return Processors(found) if found else None

    def _made(self, sampling: Sampling, prompt_tokens: int, device: Any) -> list[Any]:
        model = self._model
        try:
            config, _ = model._prepare_generation_config(self.config(sampling))
            model._prepare_special_tokens(config, True, device=device)
            config.max_length = prompt_tokens + sampling.max_new_tokens
            if config.min_new_tokens is not None:
                config.min_length = config.min_new_tokens + prompt_tokens
            found: list[Any] = model._get_logits_processor(
                config,
                input_ids_seq_length=prompt_tokens,
                device=device,
                logits_processor=self.penalties(sampling, prompt_tokens),
            )
            return found
        except AttributeError as error:
            raise ModelError(
                f"this version of transformers is not supported ({error}); use transformers 5.18 to 5.24"
            ) from error

    def _try_out(self, kind: Sampling) -> None:
        """Raise ModelError if the model's settings are invalid, for instance name tokens that it does not have."""
        if self.only_stock():
            return
        kind = replace(kind, max_new_tokens=1, min_new_tokens=0)  # the only token is the first and the last
        try:
            Processors(self._made(kind, 1, "cpu"))(torch.zeros((1, width_of(self._model.config))), [0])
        except (ValueError, TypeError, IndexError) as error:
            raise ModelError(
                f"the model's generation_config, or generate_args, cannot be used: {flat(error, 300)}"
            ) from error

    def depends_on_prompt(self, sampling: Sampling) -> bool:
        """Return whether a choice depends on the prompt beyond its logits, in which case padding would change it."""
        processors = self.processors(sampling, 1)
        return processors is not None and not all(isinstance(one, AnswerPenalties) for one in processors.by_text)

    def only_stock(self) -> str:
        """Return a key of the model's generation_config that only generate() supports, "" without one."""
        own = self._model.generation_config.to_dict() | self._given
        return next((key for key in STOCK_ONLY if _asks(key, own.get(key))), "")

    def overridden(self, sampling: Sampling) -> str:
        """Return in words how the model's own sampling differs from the config's, "" if it does not."""
        own = self._model.generation_config.to_dict()
        greedy = sampling.temperature == 0
        parts = []
        if own.get("do_sample") and greedy:
            parts.append("sampling instead of greedy decoding")
        for key in OVERRIDDEN:
            value = own.get(key)
            if value is None or value == getattr(sampling, key) or (greedy and key != "repetition_penalty"):
                continue
            if key in ("top_k", "min_p") and not value:
                continue
            parts.append(f"{key} {value}")
        return ", ".join(parts)


def _with_bias(own: Any, added: Sequence[tuple[int, float]]) -> list[list[Any]]:
    """Return a `sequence_bias`, which is applied before all penalties, with biases of single tokens added."""
    biases = {tuple(ids): bias for ids, bias in (own.items() if isinstance(own, dict) else own or ())}
    for token, bias in added:
        biases[(token,)] = biases.get((token,), 0.0) + float(bias)
    return [[list(ids), bias] for ids, bias in biases.items()]


def _by_logits(processor: Any) -> bool:
    """Return whether a processor depends only on the current logits."""
    if type(processor).__name__ == "SequenceBiasLogitsProcessor":
        return all(len(ids) == 1 for ids in processor.sequence_bias)
    return type(processor).__name__ in BY_LOGITS


class Texts(Protocol):
    """The text before each row of logits."""

    def tokens(self) -> torch.Tensor:
        """Return the tokens that each text has, (rows, n)."""

    def answers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens of each answer, which does not have its prompt, and how often it has them, (rows, n) each."""


class Processors:
    """The logits processors of one answer, in order."""

    def __init__(self, processors: Sequence[Any]) -> None:
        self._processors = processors

    @cached_property
    def by_text(self) -> list[Any]:
        """Return the processors that depend on earlier tokens."""
        return [one for one in self._processors if not _by_logits(one)]

    @cached_property
    def join(self) -> bool:
        """Whether together() serves them: they read no more of a text than which tokens it has, and how often."""
        return all(isinstance(one, AnswerPenalties) or type(one).__name__ == REPETITION for one in self.by_text)

    def together(self, logits: torch.Tensor, texts: Texts) -> torch.Tensor:
        """Return the processed logits, (rows, vocab), of several answers of the same settings."""
        none = torch.zeros((1, 1), dtype=torch.long, device=logits.device)
        for processor in self._processors:
            if isinstance(processor, AnswerPenalties):
                logits = processor.less(logits, *texts.answers())
            else:
                logits = processor(texts.tokens() if type(processor).__name__ == REPETITION else none, logits)
        return logits

    def __call__(self, logits: torch.Tensor, tokens: list[int], draft: Sequence[int] = ()) -> torch.Tensor:
        """Return the processed logits (k + 1, vocab); row i follows `tokens` and the first i tokens of `draft`."""
        text = torch.tensor([[*tokens, *draft]], device=logits.device)
        rows = [self._apply(logits[i : i + 1], text[:, : len(tokens) + i]) for i in range(len(draft) + 1)]
        return torch.cat(rows)

    def _apply(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for processor in self._processors:
            logits = processor(ids, logits)
        return logits
