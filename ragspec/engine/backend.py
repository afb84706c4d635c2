"""The engine behind the Hugging Face runner: prepares models, chooses the batch size, builds proposers, reports."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ragspec.engine.engine import CHUNK, CHUNK_CUDA, LOOKAHEAD, Engine, EngineSettings
from ragspec.engine.kv.budget import (
    SHARE,
    SHARE_POOL,
    KvBudget,
    budget_of,
    budget_over,
    choose_rows,
    most_rows,
    untimed_rows,
)
from ragspec.engine.kv.paged_cache import BLOCK, PagedCache
from ragspec.engine.kv.prefix_store import PrefixStore
from ragspec.engine.model.compiled import Wish, compile_layers
from ragspec.engine.model.fingerprint import fingerprint, weights_digest
from ragspec.engine.model.forward import Model
from ragspec.engine.model.layout import Segment
from ragspec.engine.model.loaded import (
    AttentionWish,
    GraphsWish,
    Refused,
    halves_of,
    linear_weights,
    prepare,
    refuse_offloaded,
)
from ragspec.engine.model.weight_layouts import unpack_linears
from ragspec.engine.notes import Notes
from ragspec.engine.profiler import REACHES, Clock, Profiler, probe, seconds_of
from ragspec.engine.proposers.base import AutoProposer, NoProposer, Proposer, RowProposer
from ragspec.engine.proposers.draft_model import DraftModel, DraftView, HybridProposer, SameTokensView
from ragspec.engine.proposers.early_exit import EarlyExit
from ragspec.engine.request_state import RequestState
from ragspec.engine.stored_prefixes import StoredPrefixes
from ragspec.inputs.feed import Feed
from ragspec.models.draft import width_of
from ragspec.models.logits_processors import GenerationRules, Processors
from ragspec.models.translation import Translation
from ragspec.records import Failure, Generation, Request, Sampling, Tokenizer
from ragspec.speculation.drafters.calibration import judged
from ragspec.speculation.method_selector import MethodSelector
from ragspec.speculation.methods import AUTO, HF, PLAIN, DrafterSettings, any_faulty, drafters_on, notes_on
from ragspec.speculation.step_cost import StepCost
from ragspec.structured.grammars import Grammars

log = logging.getLogger(__name__)
JOINED = "context+draft_model"  # what "auto" tries if there is a draft model
FEW = 8  # records that steps are captured for as they come, since they need few of those that many records do
SAMPLE = 64  # requests that the batch size is chosen by
NOTHING: Mapping[torch.device, int] = {}


@dataclass(frozen=True, slots=True)
class Speculation:
    """How the engine speculates.

    method: a word of speculation/methods.py, "auto" for the best of them. num_tokens: draft length, None for as long
    as pays. draft: the loaded draft model. context_length: its context, None for no limit. translation: between its
    tokens and the target's, if they differ. exit_layer: draft with this many of the target's own first layers.
    """

    method: str
    num_tokens: int | None = None
    drafting: DrafterSettings = field(default_factory=DrafterSettings)
    draft: Any = None
    context_length: int | None = None
    translation: Translation | None = None
    exit_layer: int | None = None


class EngineBackend:
    """Answers with the batched engine. Each run starts afresh: drafters know no records of an earlier one.

    Args:
        inner: The loaded target model.
        tokenizer: The target's.
        eos: Token ids that end an answer.
        speculation: How to draft.
        rows: Batch size; None: by memory and device.
        lookahead: Requests read ahead, to group those with a common prefix.
        rules: How logits become choices.
        compile: Whether to compile code for this machine.
        attention: What computes attention (loaded.py).
        graphs: Whether steps are captured.
        exact: Whether answers are the same bit for bit, whatever else a step computes (loaded.py).
        grammars: Builds the tokenizer's grammars; raises ConfigError.
        prefixes: Keeps what prompts share for later runs.
        loaded_as: What tells the model from another of its name: files, arguments.

    Raises:
        Refused: If the model does not compute the same in the engine as in transformers.
    """

    def __init__(
        self,
        inner: Any,
        tokenizer: Tokenizer,
        eos: frozenset[int],
        speculation: Speculation,
        *,
        rows: int | None,
        lookahead: int = LOOKAHEAD,
        rules: GenerationRules | None = None,
        compile: Wish = "auto",
        attention: AttentionWish = "auto",
        graphs: GraphsWish = "auto",
        exact: bool = False,
        grammars: Callable[[], Grammars] | None = None,
        prefixes: PrefixStore | None = None,
        loaded_as: str = "",
    ) -> None:
        refuse_offloaded(inner)
        self._prefixes = prefixes
        self._loaded_as = (loaded_as, weights_digest(inner)) if prefixes is not None else ()
        self._stored: StoredPrefixes | None = None
        self.clock = Clock()
        self.notes = Notes()
        self.batch_size = rows
        self._tokenizer = tokenizer
        self._eos = eos
        self._method = speculation.method
        self._num_tokens = speculation.num_tokens
        self._context_length = speculation.context_length
        self._translation = speculation.translation
        self._rows = rows
        self._most = untimed_rows(inner.device)  # most rows, if their number is chosen
        self._all_at_once = False  # whether all records fit in one batch
        self._lookahead = lookahead
        self._rules = rules
        self._grammars = grammars
        self._probed: StepCost | None = None
        self._width = width_of(inner.config)
        self._drafting = replace(speculation.drafting, vocabulary=self._width, native=compile != "off")
        self._weights = linear_weights(inner)
        if speculation.draft is not None:
            self._compare(linear_weights(speculation.draft)[0])
        # what is compiled must not depend on the length of a run
        self._compile: Wish = "on" if exact and compile == "auto" and inner.device.type == "cuda" else compile
        if speculation.exit_layer and attention in ("auto", "flex"):
            attention = "cpu" if inner.device.type == "cpu" else "sdpa"  # its two halves need rows in one piece
        make_ready = partial(prepare, native=compile != "off", attention=attention, graphs=graphs, exact=exact)
        self._model = make_ready(inner, self.notes)
        try:
            self._draft = make_ready(speculation.draft) if speculation.draft is not None else None
        except Refused as reason:
            self._model.release()
            unpack_linears(inner)
            raise Refused(f"its draft model does not fit the engine: {reason}") from reason
        try:
            self._halves = halves_of(self._model, speculation.exit_layer) if speculation.exit_layer else None
        except Refused:
            self._model.release()
            unpack_linears(inner)
            raise
        self._models = [model for model in (self._model, self._draft) if model is not None]
        self._token_bytes = sum(map(_token_bytes, self._models), Counter[torch.device]())  # by device
        self._bytes_per_token = self._token_bytes.total()
        self._paged = [model.cache for model in self._models if isinstance(model.cache, PagedCache)]
        for model in self._models:
            if model.steps is not None:
                model.steps.notes = self.notes
        if inner.device.type == "cuda":  # once, since captured steps know the addresses
            blocks = self._budget(SHARE_POOL) // (self._bytes_per_token * BLOCK)
            for cache in self._paged:
                cache.allocate(min(blocks, cache.most_blocks))
                cache.fixed = True
        self._start_anew()

    def _compare(self, weights: int) -> None:
        """Note a draft that is no smaller than the target. weights: of the draft's linear layers."""
        ratio = weights / max(1, self._weights[0])
        if ratio >= 1:
            self.notes.add(
                f"the draft model has {ratio:.1f} times the target's weights: each draft token costs about "
                f"{ratio:.1f} target steps, so drafting cannot pay off"
            )

    def _start_anew(self) -> None:
        """Forget what drafters and measurements of an earlier run have learned."""
        self._drafters = drafters_on(HF, self._method, self._drafting)
        self._candidates = [self._method]
        if self._method == AUTO:
            self._candidates = [*self._drafters] + [JOINED] * (self._draft is not None)
        self._trial = MethodSelector(self._candidates, self._model.steps is not None) if self._judged else None
        self._cost = self._probed.anew() if self._probed else None

    @property
    def _judged(self) -> bool:
        """Whether drafts are limited to what pays, or methods are compared."""
        return self._method == AUTO or (self._method != PLAIN and self._num_tokens is None)

    def warm_up(self, records: int | None = None, each: int = 0) -> None:
        """Run once what the first record would otherwise pay for, and measure step costs if draft lengths need them.

        records: expected number of records, None if unknown. each: expected output tokens per record.
        """
        rows, tokens = self._rows or self._most, None if records is None else records * each
        rows = rows if records is None else max(1, min(rows, records))
        compile_layers(self._model, rows, tokens, self._compile, self.notes)
        if self._draft is not None:
            compile_layers(self._draft, rows, tokens, self._compile, self.notes, "the draft model's")
        if self._rows is None:
            rows = self._most = self._measured(records)
            self._all_at_once = records is not None and records <= rows
        if records is None or records > FEW:
            self._capture(rows)
        if not self._judged:
            ids = [1, 2, 3, 4]
            for _ in self._engine(1, KvBudget()).run([Request(0, "warm-up", ids, Sampling(max_new_tokens=4))]):
                pass
            self.clock = Clock()
        else:
            self._probed = probe(self._model, rows)

    def _capture(self, rows: int) -> None:
        """Capture the steps that a run of `rows` rows is likely to need."""
        started, count = time.perf_counter(), 0
        for model in self._models:
            steps = model.steps
            if steps is not None and steps.captures:
                several = model is self._draft or self._method != PLAIN  # a draft model reads what was accepted
                count += steps.capture(model.rows_of(rows, REACHES[1]), drafts=several)
        if count:
            self.notes.add(f"graphs: {count} steps captured in {time.perf_counter() - started:.0f} s")

    def _measured(self, records: int | None) -> int:
        """Return the batch size beyond which speed hardly grows, or records or memory run out."""
        memory = self._budget() // (self._bytes_per_token * REACHES[0])
        limit = memory if records is None else min(records, memory)
        rows = most_rows(self._model.device, limit, partial(seconds_of, self._model))
        return rows if records is None else max(1, min(rows, records))

    def generate(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield outcomes as they finish."""
        feed = Feed(requests)
        head = feed.take(SAMPLE if self._rows is None else 1, wait=True)
        if not head:
            return
        feed.put_back(head)
        self._start_anew()
        room = self._room()
        rows = self._rows
        if rows is None:
            rows, why = choose_rows(head, room, self._most, all_at_once=self._all_at_once)
            self.notes.add(why)
        self.batch_size = rows
        if self._prefixes is not None:
            root = fingerprint(self._model, *self._loaded_as)
            self._stored = StoredPrefixes(self._prefixes, root, self._model, self.notes)
        engine = self._engine(rows, room, self._stored)
        before = self.clock.steps, self.clock.drafted_steps
        whole = False
        try:
            yield from engine.run(feed)
            whole = True
        finally:
            if self._stored is not None:
                self._stored.close(finish=whole)
            self._finish(engine, *before)

    def _room(self) -> KvBudget:
        """Return the memory for keys and values."""
        cuda, kept = self._model.device.type == "cuda", sum((each.kept_bytes for each in self._models), Counter())
        if not self._paged:
            return KvBudget(self._bytes_per_token, self._budget(kept=kept))
        budget = self._budget(SHARE_POOL if cuda else SHARE, kept)
        if cuda:
            blocks = min(cache.blocks for cache in self._paged) - 1
            budget = min(budget, blocks * BLOCK * self._bytes_per_token)
        return KvBudget(self._bytes_per_token, budget, BLOCK)

    def _budget(self, share: float = SHARE, kept: Mapping[torch.device, int] = NOTHING) -> int:
        """Return the bytes that keys and values may take, on all devices of the models together."""
        budgets = {device: budget_of(device, kept.get(device, 0), share) for device in self._token_bytes}
        return budget_over(budgets, self._token_bytes)

    def _engine(self, rows: int, room: KvBudget, stored: StoredPrefixes | None = None) -> Engine:
        self._model.resize(rows)
        self._proposers: dict[str, Proposer] = {}
        for name in self._candidates:  # JOINED, the last, takes the one of "context" from there
            self._proposers[name] = self._proposer(name, rows)
        proposer = next(iter(self._proposers.values()))
        if self._trial is not None and len(self._proposers) > 1:
            proposer = AutoProposer(self._proposers, self._trial)
        return Engine(
            self._model,
            proposer,
            self._tokenizer,
            self._eos,
            EngineSettings(
                room=room,
                cost=self._cost,
                chunk=CHUNK_CUDA if self._model.device.type == "cuda" else CHUNK,
                lookahead=self._lookahead,
                processors=self._processors if self._rules else None,
                refusal=self._refusal if self._rules else None,
                trial=self._trial,
                plain=self._probed,
                grammars=self._grammars,
                stored=stored,
            ),
            clock=self.clock,
        )

    def _processors(self, request: Request) -> Processors | None:
        assert self._rules is not None
        return self._rules.processors(request.sampling, len(request.token_ids))

    def _refusal(self, request: Request) -> str:
        assert self._rules is not None
        return self._rules.refusal(request.sampling)

    def _proposer(self, method: str, rows: int) -> Proposer:
        if method == JOINED:
            passages = self._proposers["context"]
            assert isinstance(passages, RowProposer)
            model = self._proposer("draft_model", rows)
            assert isinstance(model, DraftModel)
            return HybridProposer(passages, model, self._cost)
        if method == "draft_model":
            assert self._draft is not None
            self._draft.resize(rows)
            open = SameTokensView if self._translation is None else partial(_translated, self._translation)
            return DraftModel(self._draft, self._width, self._context_length, self._num_tokens, self._cost, open)
        if method == "early_exit":
            assert self._halves is not None
            return EarlyExit(self._model, self._halves, self._width, self._num_tokens, self._cost)
        if method in self._drafters:
            return RowProposer(self._drafters[method], self._num_tokens, self._cost)
        return NoProposer()

    def _finish(self, engine: Engine, steps_before: int, drafted_before: int) -> None:
        clock = self.clock
        steps, drafted = clock.steps - steps_before, clock.drafted_steps - drafted_before
        if self._method == AUTO and self._trial is not None:
            self.notes.add(self._trial.note())
        for note in [*engine.notes, *notes_on(self._drafters.values())]:
            self.notes.add(note)
        if self._stored is not None and self._stored.loaded_tokens:
            loaded, seconds = self._stored.loaded_tokens, self._stored.load_s
            self.notes.add(f"prefix_store: {loaded:,} prompt tokens were loaded in {seconds:.1f} s, not computed")
        if self._num_tokens is None and self._method not in (PLAIN, AUTO) and steps:
            off = 1 - drafted / steps
            if off >= 0.5 and not any_faulty(self._drafters.values()):
                self.notes.add(
                    f"speculation was off in {off:.0%} of steps: drafts were expected to cost more than they save"
                )
        outgrown = sum(getattr(proposer, "outgrown", 0) for proposer in self._proposers.values())
        if outgrown:
            self.notes.add(
                f"{outgrown} records exceeded the draft model's context of {self._context_length} tokens; it stopped "
                "drafting for them at that point"
            )
        for model in self._models:
            model.rest()

    def watched(self, bytes_per_s: float, flops_per_s: float) -> Profiler | None:
        """Return a profiler of the model's forwards; None for captured steps, of which no part is seen."""
        return None if self._paged else Profiler(self._model, bytes_per_s, flops_per_s)

    def about(self) -> dict[str, Any]:
        """Return what ran: rows, compiled layers, calibration of drafts, where the time went."""
        clock = self.clock
        about: dict[str, Any] = {"engine": "ragspec", "batch_size": self.batch_size}
        about["compiled"] = self._model.compiled is not None
        steps = self._model.steps
        about["attention"] = "flex" if steps else "cpu" if self._model.kernels else "sdpa"
        if steps is not None:
            about |= {"captured_steps": steps.captured, "cascade_steps": steps.cascaded, "exact": steps.exact}
        about["prompt_tokens_computed"] = clock.prompt_tokens
        if self._stored is not None:
            about["prefix_store"] = self._stored.about()
        spent = clock.prefill_s + clock.decode_s
        about["drafting_s"] = round(clock.drafting_s, 4)
        if self._method != PLAIN and spent:
            about["drafting_overlapped_s"] = round(clock.drafting_overlapped_s, 4)
            about["drafting_share"] = round(clock.drafting_s / spent, 4)
        if clock.masks_s:
            forced = [proposer.forced for proposer in self._proposers.values() if isinstance(proposer, RowProposer)]
            about["structured"] = {
                "masks_s": round(clock.masks_s, 4),
                "masks_share": round(clock.masks_s / spent, 4) if spent else None,
                "forced_met": sum(each.met for each in forced),
                "forced_right": sum(each.right for each in forced),
            }
        if self._cost is not None:
            parameters, size = self._weights
            about["step_cost"] = {"points": self._cost.points, "parameters": parameters, "weight_bytes": size}
        if self._trial is not None:
            found = self._trial.about()
            about |= found if self._method == AUTO else {"guard": found["guard"]}
        best = self._trial.chosen if self._trial is not None else self._method
        return about | judged(self._drafters.get(best))


def _translated(translation: Translation, row: RequestState) -> DraftView:
    return translation.open(row.tokens)


def _token_bytes(model: Model) -> Counter[torch.device]:
    model.logits([Segment(0, 0, 1)], [1], [0])
    return model.cache.bytes_by_device()
