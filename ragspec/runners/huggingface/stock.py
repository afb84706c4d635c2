"""Stock transformers `generate()`: speculation at batch size 1, or padded batches without speculation.

It serves what the engine does not: generate()'s own arguments, and devices and models that do not fit the engine.
Limit: transformers speculates on one record at a time, so `rows` only counts for method `none`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ragspec.errors import ModelError, RecordError, flat
from ragspec.inputs.feed import Feed
from ragspec.models.compat import forget, length_dependent, takes_padding
from ragspec.models.logits_processors import (
    GenerationRules,
    GrammarMasks,
    NotNumbers,
    OnlyNumbers,
    answers_by_row,
    generated_logprobs,
)
from ragspec.models.memory import MAY_BE_MEMORY, free_memory, out_of_memory
from ragspec.models.stopping import ends_with_stop, stop_strings_from, trim
from ragspec.models.tokenizer import HFTokenizer
from ragspec.records import Failure, Generation, Request, Sampling, Tokenizer, record_seed
from ragspec.runners.huggingface.assisted import (
    UNTOUCHED,
    AcceptanceMeter,
    Assistance,
    Comparison,
    Speculation,
    in_id_order,
)
from ragspec.stats import SpecStats
from ragspec.structured.grammars import Grammars, Matcher, begin


class StepClock(StoppingCriteria):  # type: ignore[misc]
    """Never stops; records when the first step ended and how many new tokens rows had then."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self.first_step_at: float | None = None
        self.first_step_tokens = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.first_step_at is None:
            self.first_step_at = time.perf_counter()
            self.first_step_tokens = input_ids.shape[1] - self._prompt_length
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class StopText(StoppingCriteria):  # type: ignore[misc]
    """Stops rows whose new text contains a stop string, anywhere in the last step's tokens.

    transformers' own stop_strings only look at the very last token (5.19), so they miss a stop string inside an
    accepted draft.
    """

    def __init__(self, tokenizer: Tokenizer, requests: Sequence[Request], prompt_length: int) -> None:
        self._tokenizer = tokenizer
        self._requests = requests  # all with the same `stop`; the beams of one request are adjacent rows
        self._seen = prompt_length
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        fresh, self._seen = input_ids.shape[1] - self._seen, input_ids.shape[1]
        answers = answers_by_row(input_ids, self._prompt_length, self._requests)
        hits = [self._ended(request, answer, fresh) for request, answer in answers]
        return torch.tensor(hits, dtype=torch.bool, device=input_ids.device)

    def _ended(self, request: Request, answer: list[int], fresh: int) -> bool:
        least = stop_strings_from(request, answer, self._tokenizer)
        return ends_with_stop(self._tokenizer, answer, fresh, request.sampling.stop, least)


class FormComplete(StoppingCriteria):  # type: ignore[misc]
    """Stops rows whose form is complete, where no end token does. matchers: one per row, None for free text."""

    def __init__(self, matchers: Sequence[Matcher | None], prompt_length: int) -> None:
        self._matchers = [each and each.copy() for each in matchers]
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        answers = answers_by_row(input_ids, self._prompt_length, self._matchers)
        hits = [matcher is not None and matcher.completes(answer) for matcher, answer in answers]
        return torch.tensor(hits, dtype=torch.bool, device=input_ids.device)


# -- backend ---------------------------------------------------------------------------------------
# errors that a model's own code may raise for a padded prompt
PADDING_ERRORS = (RuntimeError, IndexError, ValueError)
# errors that generate() raises for settings that it cannot serve, among others of a generation_config
REFUSALS = (ValueError, TypeError, AssertionError, ImportError)
log = logging.getLogger(__name__)
LEFT_NOTE = "method auto answers greedy records without it from here on"
PLAIN_IS_FASTER = "method auto: plain decoding is faster here"
OVERFLOWED = "with drafts, logits were not numbers (NaN)"
REMEDY_NOTE = "write `speculation: {method: none}` or remove what keeps ragspec's own engine from answering"


@dataclass(slots=True)
class StockClock:
    """Time spent. prefill_s: seconds to first tokens, summed over batches."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0


class StockBackend:
    """Answers with `generate()`, one call per batch. grammars: builds the tokenizer's grammars on demand.

    Raises ModelError if the model cannot roll back a draft.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: HFTokenizer,
        eos: frozenset[int],
        speculation: Speculation,
        *,
        rows: int,
        rules: GenerationRules,
        greedy_by_default: bool,
        grammars: Callable[[], Grammars] | None = None,
    ) -> None:
        self.clock = StockClock()
        self.notes: list[str] = []
        self.batch_size = rows
        self._model = model
        self._tokenizer = tokenizer
        self._eos = eos
        self._spec = speculation
        self._rules = rules
        self._grammars = grammars
        self._rotary = length_dependent(model)
        self._greedy_by_default = greedy_by_default
        self._meter: AcceptanceMeter | None = None
        self._stopped_drafting = False
        self._compared = Comparison(speculation.method) if speculation.method != "none" else None
        if speculation.method != "none":
            self._attach_meter()
            if (kind := rules.config(Sampling()).cache_implementation) not in UNTOUCHED:
                self.notes.append(f"cache_implementation: {kind} has no effect in stock generate() with drafts")
        self._assistance = Assistance(speculation, model)

    def _attach_meter(self) -> None:
        spec = self._spec
        if getattr(self._model, "_is_stateful", False):
            raise ModelError("the model keeps a recurrent state, which cannot undo a rejected draft; use method: none")
        tokenizers = None
        if spec.draft and spec.draft.other_tokens:
            tokenizers = (in_id_order(self._tokenizer.inner), in_id_order(spec.draft.tokenizer))
        reach = spec.draft.context_length if spec.draft else None
        width = spec.draft.width if spec.draft and not spec.draft.other_tokens else None
        self._meter = AcceptanceMeter(tokenizers, reach, width)
        self._meter.attach(self._model)

    def warm_up(self, records: int | None = None, each: int = 0) -> None:
        """Generate a few tokens, so that the first record does not pay for lazy initialisation."""
        ids = self._tokenizer.encode("one two three one two three", special_tokens=True)
        sampling = Sampling(max_new_tokens=4, temperature=0.0 if self._greedy_by_default else 1.0)
        try:
            self._call([Request(0, "warm-up", ids, sampling)], [None])
        except REFUSALS as error:
            raise ModelError(
                f"generate() cannot answer a first prompt: {flat(error, 300)}; it may be a setting of the model's "
                "generation_config, or of runner_args.generate_args"
            ) from error
        self.clock = StockClock()
        if self._meter is not None:
            self._meter.outgrown = self._meter.unembedded = 0

    def generate(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield outcomes in request order; a change of sampling settings starts a new batch."""
        source = Feed(requests)
        while batch := source.take(self.batch_size, wait=True):
            sampling = batch[0].sampling
            if why := self._rules.refusal(sampling):
                yield Failure(batch[0].index, why, "RecordError")
                source.put_back(batch[1:])
                continue
            # padding would change anything that depends on earlier tokens or on the text's length
            by_text = self._rules.only_stock() or self._rules.depends_on_prompt(sampling)
            alone = bool(self._rotary or by_text) or not self._takes_padding
            rows = 1 if alone else self.batch_size
            alike = list(takewhile(lambda request: request.sampling == sampling, batch))[:rows]  # noqa: B023
            source.put_back(batch[len(alike) :])
            for outcome in self._answer(alike):
                yield outcome
                if isinstance(outcome, Generation):
                    self._compare(alike[0], outcome, source)
        if self._meter and self._spec.draft and self._meter.outgrown:
            self.notes.append(
                f"{self._meter.outgrown} records outgrew the draft model's {self._spec.draft.context_length} "
                "tokens and continued without drafts"
            )
        if self._meter and self._meter.unembedded:
            self.notes.append(
                f"{self._meter.unembedded} records have tokens that the draft model does not embed, and continued "
                "without drafts"
            )

    def _compare(self, request: Request, drafted: Generation, source: Feed[Request]) -> None:
        """Decode one of the first records without drafts too, to compare the speed; the second answer is dropped."""
        compared = self._compared
        if compared is None or compared.done or drafted.undrafted:
            return
        more = source.take(1, wait=False)
        source.put_back(more)
        if not more:
            return
        clock, self.clock = self.clock, StockClock()
        try:
            plain = self._call([request], [begin(self._grammars, request.grammar)], "a comparison")[0]
        except MAY_BE_MEMORY as error:  # the answer with drafts is there; only the comparison is lost
            out_of_memory(error)
            self._compared = None
            return
        finally:
            self.clock = clock
        compared.add(len(drafted.token_ids), drafted.latency_s, len(plain.token_ids), plain.latency_s)
        if compared.done and compared.slower:
            self._stopped_drafting = self._spec.on_trial
            self.notes.append(compared.note(LEFT_NOTE if self._stopped_drafting else REMEDY_NOTE))

    @cached_property
    def _takes_padding(self) -> bool:
        """Whether a prompt gets the same answer in a padded batch as alone."""
        if self.batch_size == 1:
            return True
        try:
            if takes_padding(self._model, self._rules.pad):
                return True
        except PADDING_ERRORS as error:
            log.debug("the model does not take padded prompts", exc_info=error)
        self.notes.append("records are answered one at a time: padding changes what this model computes")
        return False

    def _answer(self, batch: list[Request], undrafted: str = "") -> Iterator[Generation | Failure]:
        """Answer a batch; if it fails, answer its records one by one, so that only the faulty one fails.

        Where it overflows with drafts, which may be wrong, it is answered without. undrafted: as _call takes it.
        """
        try:
            matchers = [begin(self._grammars, request.grammar) for request in batch]
            yield from self._call(batch, matchers, undrafted)
            return
        except RecordError as error:
            if isinstance(error, NotNumbers) and self._spec.method != "none" and not undrafted:
                yield from self._answer(batch, OVERFLOWED)
                return
            failure = Failure(batch[0].index, str(error), "RecordError")
        except ValueError as error:  # generate() refuses its arguments
            failure = Failure(batch[0].index, f"generate() rejects it: {flat(error, 500)}")
        except MAY_BE_MEMORY as error:
            failure = Failure(batch[0].index, out_of_memory(error))
            free_memory()
        if len(batch) == 1:
            yield failure
            return
        for request in batch:
            yield from self._answer([request], undrafted)

    def _shaped(self, request: Request, token_ids: list[int], reason: str) -> tuple[list[int], str]:
        """Return the tokens of an answer with a grammar, and its finish reason.

        An answer that no end token ends is over when its form is complete. It is cut off by an end token that was
        forced as the last of all. Raises RecordError for any other token that the grammar does not allow.
        """
        matcher = begin(self._grammars, request.grammar)
        assert matcher is not None
        if matcher.endless:
            token_ids = token_ids[: matcher.until_complete(token_ids)]
        matcher.take(token_ids)
        if matcher.stuck and len(token_ids) == request.sampling.max_new_tokens:
            return token_ids, "length"
        if matcher.problem:
            raise RecordError(matcher.problem)
        return token_ids, "stop" if matcher.endless and matcher.complete else reason

    def _call(self, batch: list[Request], matchers: list[Matcher | None], undrafted: str = "") -> list[Generation]:
        """Answer a batch. undrafted: why without drafts, "" for with."""
        sampling = batch[0].sampling
        width = max(len(request.token_ids) for request in batch)
        rows = [[self._rules.pad] * (width - len(request.token_ids)) + request.token_ids for request in batch]
        masks = [[0] * (width - len(request.token_ids)) + [1] * len(request.token_ids) for request in batch]
        clock = StepClock(width)
        criteria = StoppingCriteriaList([clock])
        if sampling.stop:
            criteria.append(StopText(self._tokenizer, batch, width))
        if sampling.temperature > 0:
            torch.manual_seed(record_seed(sampling.seed, batch[0].id))
        if self._meter:
            self._meter.start()
        for module in self._rotary:
            forget(module)
        # a sampled answer must not depend on timing
        plain_only = self._stopped_drafting and sampling.temperature == 0
        undrafted = undrafted or (PLAIN_IS_FASTER if plain_only else "")
        config = self._generation_config(sampling)
        undrafted = undrafted or self._assistance.no_drafts_reason(sampling, config, shaped=any(matchers))
        if not undrafted:
            self._assistance.configure(config)
        processors: list[Any] = [OnlyNumbers(), *self._rules.penalties(sampling, width)]
        if any(matchers):
            if any(each is not None and each.endless for each in matchers):
                criteria.append(FormComplete(matchers, width))
            processors.append(GrammarMasks(matchers, width))
        device = self._model.device
        started = time.perf_counter()
        output = self._model.generate(
            input_ids=torch.tensor(rows, device=device),  # (batch, width), padded on the left
            attention_mask=torch.tensor(masks, device=device),
            generation_config=config,
            logits_processor=LogitsProcessorList(processors),
            stopping_criteria=criteria,
            **{"tokenizer": self._tokenizer.inner, **({} if undrafted else self._assistance.arguments(sampling))},
        )
        answers = output.sequences[:, width:].tolist()
        ended = time.perf_counter()
        first = clock.first_step_at or ended
        self.clock.prefill_s += first - started
        self.clock.decode_s += ended - first
        generations = []
        for row, (request, answer) in enumerate(zip(batch, answers, strict=True)):
            least = stop_strings_from(request, answer, self._tokenizer)
            token_ids, reason = trim(answer, sampling.ends(self._eos), sampling.stop, self._tokenizer, least)
            if request.grammar:
                token_ids, reason = self._shaped(request, token_ids, reason)
            self.clock.decode_tokens += max(0, len(token_ids) - clock.first_step_tokens)
            spec = self._meter.stats if self._meter and not undrafted else SpecStats(steps=len(token_ids))
            spec.end(len(token_ids))
            generations.append(
                Generation(
                    request.index,
                    token_ids,
                    reason,
                    spec,
                    ended - started,
                    first - started,
                    logprobs=generated_logprobs(output, row, token_ids, sampling.logprobs),
                    undrafted=undrafted,
                )
            )
        return generations

    def _generation_config(self, sampling: Sampling) -> Any:
        config = self._rules.config(sampling)
        config.return_dict_in_generate = True
        config.output_logits = sampling.logprobs is not None
        # these are not used, and with drafts transformers 5.19 fails to collect them
        config.output_scores = config.output_attentions = config.output_hidden_states = False
        return config

    def watched(self, bytes_per_s: float, flops_per_s: float) -> None:
        """Return None: generate() cannot be profiled."""

    def about(self) -> dict[str, Any]:
        """Return the engine's name and batch size."""
        return {"engine": "transformers", "batch_size": self.batch_size}
