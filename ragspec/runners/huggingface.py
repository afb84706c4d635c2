"""Stock transformers `generate()`: every speculation it has at batch size 1, padded batches without.

    runner: huggingface
    runner_args: {batch_size: 8, dtype: bfloat16, device: cuda}

Limit: transformers speculates one record at a time, so `batch_size` only counts for method `none`.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field

from ragspec.config import RunConfig
from ragspec.errors import ConfigError, ModelError
from ragspec.models import ModelSource, context_length, read_model_config, resolve
from ragspec.quiet import quiet
from ragspec.records import Failure, Generation, Request, Sampling, record_seed
from ragspec.runners.base import RunnerArgs
from ragspec.stats import SpecStats
from ragspec.suggest import did_you_mean

if TYPE_CHECKING:
    from ragspec.hf.acceptance import AcceptanceMeter
    from ragspec.hf.draft import Draft

METHODS = ("none", "prompt_lookup", "draft_model", "early_exit")
PLAIN_BATCH_SIZE = 8
LOOKUP_TOKENS = 10  # transformers' own default
OURS = ("max_new_tokens", "max_length", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
DRAFT_KNOBS = ("assistant_lookbehind", "target_lookbehind")


class Args(RunnerArgs):
    """`runner_args` of the Hugging Face runner."""

    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on a CPU, else the model's own
    device: str = "auto"
    num_gpus: Annotated[int, Field(ge=0)] | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    model_args: dict[str, Any] = {}  # to from_pretrained of the model
    tokenizer_args: dict[str, Any] = {}  # to from_pretrained of the tokenizer
    encode_args: dict[str, Any] = {}  # to every call of the tokenizer
    generate_args: dict[str, Any] = {}  # to generate()

    def neutral_keys(self) -> set[str]:
        return {"batch_size"}


class Runner:
    """Answers with `generate()`, one call per batch."""

    def __init__(self, config: RunConfig) -> None:
        args = config.args()
        assert isinstance(args, Args)
        assert config.model is not None
        self._args = args
        self._model_name = config.model
        self._spec = config.speculation
        self._model: Any = None
        self._draft: Draft | None = None
        self._draft_model: Any = None
        self._sampling_draft: Any = None  # a copy: universal speculative sampling rewrites the draft's embeddings
        self._loaded: dict[str, str] = {}
        self._meter: AcceptanceMeter | None = None
        self._greedy_by_default = config.sampling.temperature == 0
        self.method = config.speculation.method
        self.remembers = False
        self.notes: list[str] = []
        self.prefill_s: float | None = 0.0
        self.decode_s: float | None = 0.0
        self.decode_tokens = 0

    # -- before any weights ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Find model, draft and tokenizers. Raises ConfigError for whatever could not work."""
        quiet()
        self._check_args()
        from ragspec.hf.tokenizer import HFTokenizer, load_tokenizer

        args = self._args
        self._source = resolve(self._model_name, args.revision)
        self._hf_config = read_model_config(self._source, trust_remote_code=args.trust_remote_code)
        if self._hf_config.is_encoder_decoder:
            raise ConfigError(f'model: "{self._model_name}" is an encoder-decoder; ragspec runs causal language models')
        tokenizer = load_tokenizer(self._source, trust_remote_code=args.trust_remote_code, **args.tokenizer_args)
        self.tokenizer = HFTokenizer(tokenizer, args.encode_args)
        self.context_length = context_length(self._hf_config)
        self._draft = self._find_draft(tokenizer) if self.method == "draft_model" else None
        self._batch_size = self._choose_batch_size()
        if self.method == "early_exit":
            layers = self._hf_config.get_text_config().num_hidden_layers
            if (self._spec.early_exit_layer or 0) >= layers:
                raise ConfigError(
                    f"speculation.early_exit_layer: {self._spec.early_exit_layer} is not below the model's {layers}"
                )

    def _refuse_unknown(self, section: str, given: dict[str, Any], known: set[str], ours: tuple[str, ...]) -> None:
        """Raise ConfigError for a key that transformers would take without a word, or that ragspec sets itself."""
        for key in given:
            if key in ours:
                raise ConfigError(
                    f"runner_args.{section}.{key}: ragspec sets it (section sampling, and padding); take it out"
                )
            if key not in known:
                raise ConfigError(f'"runner_args.{section}.{key}" is not known{did_you_mean(key, sorted(known))}')

    def _check_args(self) -> None:
        from transformers import GenerationConfig, PreTrainedTokenizerBase

        from ragspec.hf.loading import check_device

        generate = self._args.generate_args
        if generate.get("num_return_sequences", 1) != 1:
            raise ConfigError("runner_args.generate_args.num_return_sequences: must be 1: one answer a record")
        if generate.get("num_beams", 1) != 1 and self.method != "none":
            raise ConfigError(
                f"runner_args.generate_args.num_beams: {generate['num_beams']} does not combine with speculation; "
                "set speculation.method: none, or take num_beams out"
            )
        if generate.get("assistant_ensemble_weight") is not None:
            raise ConfigError("runner_args.generate_args.assistant_ensemble_weight: changes the answers; take it out")
        for name in ("ngram_min", "num_tokens_by_batch_size"):
            if getattr(self._spec, name) is not None:
                self.notes.append(f"speculation.{name}: without effect on runner huggingface; vllm has it")
        self._refuse_unknown("generate_args", generate, set(vars(GenerationConfig())), OURS)
        call = set(inspect.signature(PreTrainedTokenizerBase.__call__).parameters) - {"self", "text"}
        self._refuse_unknown("encode_args", self._args.encode_args, call, ("return_tensors", "padding"))
        check_device(self._args.device)
        unknown = sorted(set(self._spec.extra) - set(DRAFT_KNOBS))
        if unknown:
            raise ConfigError(
                f"speculation.extra.{unknown[0]}: is not known to transformers; known: {', '.join(DRAFT_KNOBS)}"
            )

    def _find_draft(self, tokenizer: Any) -> Draft:
        from ragspec.hf.draft import find_draft, width_of

        draft = find_draft(
            self._spec.draft_model or "",
            self._spec.draft_tokenizer,
            (self._model_name, tokenizer, width_of(self._hf_config)),
            trust_remote_code=self._args.trust_remote_code,
            remedy="for universal assisted decoding",
        )
        if self._spec.draft_tokenizer and not draft.other_tokens:
            self.notes.append(
                "speculation.draft_tokenizer: not needed, target and draft share their tokens; "
                "drafts are handed over as they are"
            )
        return draft

    def _choose_batch_size(self) -> int:
        asked = self._args.batch_size
        if self.method == "none":
            return PLAIN_BATCH_SIZE if asked == "auto" else asked
        if asked not in ("auto", 1):
            self.notes.append(
                f"runner_args.batch_size: {asked} is without effect with method {self.method}: "
                "generate() speculates one record at a time"
            )
        return 1

    # -- weights --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        from ragspec.hf.acceptance import AcceptanceMeter, in_id_order

        self._model = self._load(self._source, self._args.model_args, self._args.revision)
        if self.method != "none":
            if getattr(self._model, "_is_stateful", False):
                raise ModelError(
                    f'"{self._model_name}" keeps a recurrent state, which cannot take back a draft; use method: none'
                )
            if self._draft:
                self._draft_model = self._load(self._draft.source, {}, None)
            self._set_knobs(self._draft_model if self._draft else self._model)
            tokenizers = None
            if self._draft and self._draft.other_tokens:
                tokenizers = (in_id_order(self.tokenizer.inner), in_id_order(self._draft.tokenizer))
            reach = self._draft.context_length if self._draft else None
            self._meter = AcceptanceMeter(tokenizers, reach)
            self._meter.attach(self._model)
        self._loaded = {"dtype": str(self._model.dtype).removeprefix("torch."), "device": str(self._model.device)}
        own = self._model.generation_config.eos_token_id
        eos = own if own is not None else self.tokenizer.inner.eos_token_id
        eos = self._args.generate_args.get("eos_token_id", eos)
        self._eos = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
        pad = self.tokenizer.inner.pad_token_id
        self._pad = pad if pad is not None else min(self._eos, default=0)
        return self

    def __exit__(self, *exc: object) -> None:
        self._model = self._draft_model = self._sampling_draft = self._meter = None
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _load(self, source: ModelSource, extra: dict[str, Any], revision: str | None) -> Any:
        from ragspec.hf.loading import load_model, pick_device

        args = self._args
        return load_model(
            source,
            device=pick_device(args.device, args.num_gpus),
            dtype=args.dtype,
            num_gpus=args.num_gpus,
            revision=revision,
            trust_remote_code=args.trust_remote_code,
            extra=extra,
        )

    def _set_knobs(self, drafter: Any) -> None:
        """Set the draft's own settings where transformers reads them: on the drafting model's generation_config."""
        knobs = drafter.generation_config
        knobs.num_assistant_tokens_schedule = self._spec.schedule
        if self._spec.num_tokens != "auto":
            knobs.num_assistant_tokens = self._spec.num_tokens
        if self._spec.confidence_threshold is not None:
            knobs.assistant_confidence_threshold = self._spec.confidence_threshold
        for name, value in self._spec.extra.items():
            setattr(knobs, name, value)

    def warm_up(self) -> None:
        """Generate a few tokens, so that the first record does not pay for lazy initialisation."""
        ids = self.tokenizer.encode("one two three one two three", special_tokens=True)
        sampling = Sampling(max_new_tokens=4, temperature=0.0 if self._greedy_by_default else 1.0)
        for _ in self._call([Request(0, "warm-up", ids, sampling)]):
            pass
        self.prefill_s = self.decode_s = 0.0
        self.decode_tokens = 0

    # -- answering ------------------------------------------------------------------------------------------------

    def generate(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield outcomes in the order of the requests; records of other sampling settings begin a new batch."""
        for _, same in groupby(requests, key=lambda request: request.sampling):
            while batch := list(islice(same, self._batch_size)):
                yield from self._answer(batch)
        if self._draft and self._meter and self._meter.outgrown:
            self.notes.append(
                f"{self._meter.outgrown} records were longer than the {self._draft.context_length} tokens that "
                "the draft model attends to; they went on without drafts"
            )

    def _answer(self, batch: list[Request]) -> Iterator[Generation | Failure]:
        """Answer a batch; if it fails, answer its records one by one, so that one alone can be at fault."""
        try:
            yield from self._call(batch)
        except Exception as error:  # any failure inside generation is this record's, not the run's
            self._free_memory()
            if len(batch) == 1:
                text = " ".join(str(error).split())[:500]
                yield Failure(batch[0].index, f"{type(error).__name__}: {text}")
                return
            for request in batch:
                yield from self._answer([request])

    def _free_memory(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _call(self, batch: list[Request]) -> list[Generation]:
        import torch
        from transformers import StoppingCriteriaList

        from ragspec.hf.stopping import StepClock, StopText, trim

        sampling = batch[0].sampling
        width = max(len(request.token_ids) for request in batch)
        rows = [[self._pad] * (width - len(request.token_ids)) + request.token_ids for request in batch]
        masks = [[0] * (width - len(request.token_ids)) + [1] * len(request.token_ids) for request in batch]
        clock = StepClock(width)
        criteria = StoppingCriteriaList([clock])
        if sampling.stop:
            criteria.append(StopText(self.tokenizer, sampling.stop, width))
        if sampling.temperature > 0:
            torch.manual_seed(record_seed(sampling.seed, batch[0].id))
        if self._meter:
            self._meter.start()
        device = self._model.device
        started = time.perf_counter()
        output = self._model.generate(
            input_ids=torch.tensor(rows, device=device),  # (batch, width), padded on the left
            attention_mask=torch.tensor(masks, device=device),
            generation_config=self._generation_config(sampling),
            stopping_criteria=criteria,
            **self._assistant(sampling),
        )
        answers = output[:, width:].tolist()
        ended = time.perf_counter()
        first = clock.first_step_at or ended
        self.prefill_s = (self.prefill_s or 0.0) + first - started
        self.decode_s = (self.decode_s or 0.0) + ended - first
        generations = []
        for request, answer in zip(batch, answers, strict=True):
            token_ids, reason = trim(answer, self._eos, sampling.stop, self.tokenizer)
            self.decode_tokens += max(0, len(token_ids) - clock.first_step_tokens)
            spec = self._meter.stats if self._meter else SpecStats(steps=len(token_ids))
            generations.append(Generation(request.index, token_ids, reason, spec, ended - started, first - started))
        return generations

    def _generation_config(self, sampling: Sampling) -> Any:
        config = copy.deepcopy(self._model.generation_config)
        config.max_length = None
        config.max_new_tokens = sampling.max_new_tokens
        config.eos_token_id = sorted(self._eos) or None
        config.pad_token_id = self._pad
        config.do_sample = sampling.temperature > 0
        config.repetition_penalty = sampling.repetition_penalty
        greedy = not config.do_sample
        config.temperature = None if greedy else sampling.temperature
        config.top_p = None if greedy else sampling.top_p
        config.top_k = None if greedy else sampling.top_k
        config.min_p = None if greedy or not sampling.min_p else sampling.min_p
        if self.method == "prompt_lookup":
            asked = self._spec.num_tokens
            config.prompt_lookup_num_tokens = LOOKUP_TOKENS if asked == "auto" else asked
            config.max_matching_ngram_size = self._spec.ngram_max
        elif self.method == "early_exit":
            config.assistant_early_exit = self._spec.early_exit_layer
        for name, value in self._args.generate_args.items():
            setattr(config, name, value)
        return config

    def _assistant(self, sampling: Sampling) -> dict[str, Any]:
        if self._draft is None:
            return {}
        draft = self._draft_model
        if self._draft.other_tokens and sampling.temperature > 0:
            # transformers 5.19 prunes the draft's output layer in place for this, which greedy records must not see
            if self._sampling_draft is None:
                self._sampling_draft = copy.deepcopy(self._draft_model)
            draft = self._sampling_draft
        kwargs: dict[str, Any] = {"assistant_model": draft}
        if int(self._hf_config.get_text_config().vocab_size) != self._draft.width:
            # generate() insists on both where sizes differ; whether they are used is AcceptanceMeter's decision
            kwargs |= {"tokenizer": self.tokenizer.inner, "assistant_tokenizer": self._draft.tokenizer}
        return kwargs

    def about(self) -> dict[str, Any]:
        """Return what ran: model, revision, dtype, device, batch size, draft."""
        about: dict[str, Any] = {
            "model": self._source.path,
            "revision": getattr(self._hf_config, "_commit_hash", None),
            "batch_size": self._batch_size,
            "context_length": self.context_length,
        }
        about |= self._loaded
        if self._draft:
            about["draft_model"] = self._draft.source.path
            about["draft_vocabulary"] = "other" if self._draft.other_tokens else "same"
        return about
