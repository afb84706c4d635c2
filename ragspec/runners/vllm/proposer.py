"""ragspec's drafters inside vLLM, loaded as `speculative_config={"method": "custom_class", "model": ...}`.

    additional_config={"ragspec": {"method": "context", "num_tokens": None, "drafting": {"isolate": False}}}

vLLM passes token ids by slot. Which request a slot holds is read from its model runner's batch (`follow`), and what a
request says to us from its sampling parameters: {"ragspec": {"passages": [[0, 90]], "drafts": True}} in `extra_args`.
Draft lengths follow the same rule as in ragspec's engine: calibrated cumulative acceptance against the cost of a step.
Source: vLLM 0.32, v1/spec_decode/custom_class_proposer.py, v1/worker/gpu_input_batch.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ragspec.errors import RagspecError
from ragspec.runners.vllm.patches import KEY
from ragspec.speculation.draft_length import allocate, allocate_flat, least_acceptance
from ragspec.speculation.drafters.base import Draft, RowDrafter, propose_all, settle
from ragspec.speculation.drafters.calibration import follow_to, judged
from ragspec.speculation.drafters.native import DraftBatch
from ragspec.speculation.forced_tokens import ForcedTokens
from ragspec.speculation.method_selector import MethodSelector
from ragspec.speculation.methods import AUTO, VLLM, DrafterSettings, drafters_on, notes_on
from ragspec.speculation.step_cost import FittedCost
from ragspec.structured.grammars import Grammars, Matcher

LOGPROBS_BYTES = 1 << 29  # that vLLM may take for the log-probabilities of drafts
NUMBER_BYTES = 9  # of each: two in float32, and whether it counts


@dataclass(slots=True, eq=False)
class Tracked:
    """A request in vLLM's batch. length: tokens of prompt and answer as far as seen. end: maximum length of both.

    accepted: where draft tokens were accepted, positions in the answer, and the prompt positions they were copied from.
    """

    length: int
    prompt_tokens: int
    drafters: Mapping[str, RowDrafter]
    end: int
    draft: Draft | None = None  # proposed for the next step
    accepted: list[tuple[int, list[int | None]]] = field(default_factory=list)
    grammar: Matcher | None = None  # state of the answer's grammar, if it has one
    step: int = -1  # the latest step that generated tokens of it

    def extend(self, fresh: list[int], emitted: int) -> None:
        """Append new tokens. The last `emitted` are from the last step; all of those but the final one were drafts."""
        if emitted > 1:
            draft = self.draft if len(fresh) == emitted else None  # it is not these tokens' if steps were not seen
            sources = draft.sources[: emitted - 1] if draft is not None else []
            start = self.length - self.prompt_tokens + len(fresh) - emitted
            self.accepted.append((start, sources or [None] * (emitted - 1)))
        for drafter in self.drafters.values():
            drafter.extend(fresh)
        if self.grammar is not None:
            self.grammar.take(fresh)
        self.length += len(fresh)
        self.draft = None

    def close(self) -> None:
        """Close the drafters."""
        for drafter in self.drafters.values():
            drafter.close()


class Proposer:
    """Drafts for vLLM's batch."""

    def __init__(self, vllm_config: Any) -> None:
        self._settings = vllm_config.additional_config[KEY]
        self._max_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._model_config = vllm_config.model_config
        self._context_length = int(vllm_config.model_config.max_model_len)
        self.model_runner: Any = None  # vLLM's, see follow()
        self.reset()

    def reset(self) -> None:
        """Forget all requests and measurements, as for a new run."""
        method = self._settings["method"]
        self._drafters = drafters_on(VLLM, method, DrafterSettings(**self._settings["drafting"]))
        self.trial = MethodSelector(list(self._drafters) if method == AUTO else [method])
        self.cost = FittedCost()
        # expected cost of plain steps: the initial shape, never fitted
        self._plain = FittedCost()
        self._is_guarded = method == AUTO or self._settings["num_tokens"] is None
        self.drafting_s = self.overlapped_s = 0.0  # what steps waited for, and what was done beside them
        # no end token: vLLM counts tokens differently once a grammar has consumed one
        self.forced = {name: ForcedTokens(end=False) for name in self._drafters}
        self._rows: dict[str, Tracked] = {}  # by vLLM's request ids
        self._finished: list[Tracked] = []  # to be closed
        self._step = 0
        self._step_size = (0, 0)  # (tokens, rows) of the step in progress, if it only decodes
        self._step_started = 0.0
        self._own_s = self._propose_s = 0.0  # seconds spent here before that step; the part of it spent on proposing

    def load_model(self, target: Any) -> None:
        """Do nothing; vLLM's CPU build calls this on every proposer."""

    # -- calls of ours, in the engine's process ----------------------------------------------------

    def follow(self, model_runner: Any) -> None:
        """Read requests and slots from vLLM's model runner; without it nothing is drafted."""
        self.model_runner = model_runner

    def settle(self) -> None:
        """Do what the next drafts do not need: close what has ended, read new prompts. While the device computes."""
        began = time.perf_counter()
        while self._finished:
            self._finished.pop().close()
        for name in self.model_runner.input_batch.req_ids:
            if name not in self._rows:
                self._rows[name] = self._open(name, self.model_runner.requests[name].prompt_token_ids)
        for drafter in self._drafters.values():
            settle(drafter)
        self.overlapped_s += time.perf_counter() - began

    @property
    def known(self) -> int:
        """Requests that it follows, those outside the batch among them."""
        return len(self._rows)

    def finish(self, name: str) -> Tracked | None:
        """Remove a request that has ended and return what was tracked of it, None if nothing was."""
        row = self._rows.pop(name, None)
        if row is not None:
            self._finished.append(row)
            for forced in self.forced.values():
                forced.forget(id(row))
            if row.step == self._step:  # it is not part of the next step
                tokens, rows = self._step_size
                drafted = len(row.draft.token_ids) if row.draft is not None else 0
                self._step_size = (max(0, tokens - 1 - drafted), max(0, rows - 1))
        return row

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the drafters."""
        return notes_on(self._drafters.values()) + ([self.trial.note()] if self._settings["method"] == AUTO else [])

    def about(self) -> dict[str, Any]:
        """Return the drafting time and how well the drafters were calibrated."""
        about: dict[str, Any] = {
            "drafting_s": round(self.drafting_s, 3),
            "drafting_overlapped_s": round(self.overlapped_s, 3),
        }
        if self._is_guarded:
            found = self.trial.about()
            about |= found if self._settings["method"] == AUTO else {"guard": found["guard"]}
        return about | judged(self._drafters.get(self.trial.chosen))

    # -- calls of vLLM -----------------------------------------------------------------------------

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return the draft of each slot after a step. sampled_token_ids: new tokens of each slot.

        num_tokens_no_spec and token_ids_cpu: tokens of each slot so far, and their ids, (slots, max length).
        """
        if self.model_runner is None:
            return [[] for _ in sampled_token_ids]
        started = time.perf_counter()
        rows, prompts = self._update(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        written = sum(len(ids) for ids in sampled_token_ids)
        for slot, row in rows.items():
            if row.grammar is not None:
                for forced in self.forced.values():
                    forced.score(id(row), sampled_token_ids[slot])
        if all(self._step_size) and not prompts and written:
            seconds = started - self._step_started
            self.cost.observe(*self._step_size, seconds)
            tokens, before = self._step_size
            seconds, expected = seconds + self._own_s, self._plain(before, before)
            self.trial.observe(before, tokens - before, written, seconds, expected, self._propose_s)
        drafts: dict[int, Draft] = {}
        count = len(rows)
        self._propose_s = 0.0
        if rows and (not self._is_guarded or self.trial.allows(count, self._plain(count, count), mixed=bool(prompts))):
            asked = time.perf_counter()
            drafts = self.trial.ask(
                lambda name: self._propose_paying(name, rows), lambda name: self._propose_all(name, rows)
            )
            self._propose_s = time.perf_counter() - asked
        proposed: list[list[int]] = [[] for _ in sampled_token_ids]
        for slot, draft in drafts.items():
            rows[slot].draft = draft
            proposed[slot] = draft.token_ids
        self._step_size = (len(rows) + sum(len(draft.token_ids) for draft in drafts.values()), len(rows))
        self._step_started = time.perf_counter()
        self._own_s = self._step_started - started
        self.drafting_s += self._own_s
        return proposed

    def _update(
        self, sampled: Sequence[Sequence[int]], lengths: np.ndarray, tokens: np.ndarray
    ) -> tuple[dict[int, Tracked], bool]:
        """Take in the tokens of a step.

        Returns:
            The request of each slot that generated tokens; and whether the step did more than decode: it also
            computed prompts (including those of preempted requests), or followed steps that were not seen.
        """
        names, before = self.model_runner.input_batch.req_ids, self._step
        self._step += 1
        seen: dict[int, Tracked] = {}
        more = False
        for slot, (token_ids, name, length) in enumerate(zip(sampled, names, lengths.tolist(), strict=False)):
            emitted = len(token_ids)
            if not emitted:  # its prompt is not computed yet
                more = True
                continue
            row = self._rows.get(name)
            if row is None:
                self._forget_ended()
                row = self._rows[name] = self._open(name, tokens[slot, : length - emitted].tolist())
                more = True
            if row.length + emitted == length:
                more = more or row.step != before
                row.extend(list(token_ids), emitted)
            else:
                more = True
                row.extend(tokens[slot, row.length : length].tolist(), emitted)
            row.step = self._step
            seen[slot] = row
        return seen, more

    def _forget_ended(self) -> None:
        """Close requests of whose end nobody tells, as where vLLM's devices have processes of their own."""
        if len(self._rows) > 2 * len(self.model_runner.requests):  # preempted ones are among those
            for name in [name for name in self._rows if name not in self.model_runner.requests]:
                self.finish(name)
            while self._finished:
                self._finished.pop().close()

    def _open(self, name: str, token_ids: list[int]) -> Tracked:
        """Return a request that vLLM has begun to answer. token_ids: as far as they were not generated this step."""
        request = self.model_runner.requests[name]
        params = request.sampling_params
        told = (params.extra_args or {}).get(KEY, {})
        prompt = token_ids[: len(request.prompt_token_ids)]
        passages = [(start, end) for start, end in told.get("passages", ())]
        wanted = self.trial.candidates if told.get("drafts", True) else ()
        drafters = {name: drafter.open(prompt, passages) for name, drafter in self._drafters.items() if name in wanted}
        end = min(self._context_length, len(prompt) + (params.max_tokens or self._context_length))
        grammar = params.structured_outputs.grammar if params.structured_outputs is not None else None
        return Tracked(len(prompt), len(prompt), drafters, end, grammar=self._matcher(grammar))

    def _matcher(self, grammar: str | None) -> Matcher | None:
        """Return the initial state of the answer's grammar, None without one."""
        if not grammar:
            return None
        try:
            return self._grammars.matcher(grammar)
        except RagspecError:  # vLLM compiles it too, and reports the error for the record
            return None

    @cached_property
    def _grammars(self) -> Grammars:
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer: Any = cached_tokenizer_from_config(self._model_config)
        return Grammars(tokenizer, int(self._model_config.get_vocab_size()), {tokenizer.eos_token_id})

    def _propose_paying(self, method: str, rows: dict[int, Tracked]) -> dict[int, Draft]:
        """Return the drafts of `method` by slot, cut to the length that pays."""
        slots, drafts = self._propose_all(method, rows)
        if not slots or self._settings["num_tokens"] is not None:
            return dict(zip(slots, drafts, strict=True))
        if isinstance(drafts, DraftBatch) and len(slots) == len(rows):
            paying = zip(slots, drafts.paying(self.cost, 0), strict=True)
            return {slot: draft for slot, draft in paying if draft.token_ids}
        if isinstance(drafts, DraftBatch):  # rows without drafters count in the step, and have nothing to verify
            counts = np.zeros(len(rows), np.int64)
            places = {slot: place for place, slot in enumerate(rows)}
            taken = [places[slot] for slot in slots]
            counts[taken] = drafts.counts
            lengths = allocate_flat(drafts.acceptance, counts, self.cost, 0)[taken]
            return {slot: draft for slot, draft in zip(slots, drafts.cut(lengths), strict=True) if draft.token_ids}
        chains = {slot: draft.cumulative_acceptance for slot, draft in zip(slots, drafts, strict=True)}
        kept = dict(zip(rows, allocate([chains.get(slot, []) for slot in rows], self.cost, 0), strict=True))
        return {slot: draft.cut(kept[slot]) for slot, draft in zip(slots, drafts, strict=True) if kept[slot]}

    def _propose_all(self, method: str, rows: dict[int, Tracked]) -> tuple[list[int], Sequence[Draft]]:
        """Return the slots that `method` drafts for, and their drafts."""
        if self._settings["num_tokens"] is None:  # stop drafting where no further token could pay
            follow_to(self._drafters[method], least_acceptance(len(rows), self.cost, 0))
        most = min(self._settings["num_tokens"] or self._max_tokens, self._most_with_logprobs())
        slots, drafters, limits, has_grammar = [], [], [], False
        for slot, row in rows.items():
            limit = min(most, row.end - row.length - 1)
            if limit > 0 and method in row.drafters:
                slots.append(slot)
                drafters.append(row.drafters[method])
                limits.append(limit)
                has_grammar = has_grammar or row.grammar is not None
        drafts = propose_all(self._drafters[method], drafters, limits)
        if not has_grammar:
            return slots, drafts
        given = zip(slots, drafts, limits, strict=True)
        return slots, [self._joined(method, rows[slot], draft, limit) for slot, draft, limit in given]

    def _most_with_logprobs(self) -> int:
        """Return how long drafts may be because of log-probabilities, once a row of the batch asks for some.

        vLLM 0.32 then makes room for all rows with as many tokens as the longest draft has (rejection_sampler.py), of
        which its profile of memory knows nothing.
        """
        batch = self.model_runner.input_batch
        if not batch.num_logprobs:
            return self._max_tokens
        tokens = LOGPROBS_BYTES // (NUMBER_BYTES * int(self._model_config.get_vocab_size()))
        return max(0, int(tokens) // len(batch.req_ids) - 1)

    def _joined(self, method: str, row: Tracked, draft: Draft, limit: int) -> Draft:
        """Return a draft joined with what the row's grammar forces."""
        if row.grammar is None or row.grammar.ended or row.grammar.problem:
            return draft
        return self.forced[method].join(id(row), row.grammar, draft, limit)
