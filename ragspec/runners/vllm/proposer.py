"""ragspec's drafters inside vLLM, loaded as `speculative_config={"method": "custom_class", "model": ...}`.

    additional_config={"ragspec": {"method": "context", "num_tokens": None, "drafting": {"isolate": False}}}

vLLM passes token ids by slot and moves requests between slots, so TrackedRequests recognises requests by their tokens.
Draft lengths follow the same rule as in ragspec's engine: calibrated cumulative acceptance against the cost of a step.
Source: vLLM 0.32, v1/spec_decode/custom_class_proposer.py. Limit: requests are recognised in Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ragspec.errors import RagspecError
from ragspec.speculation.copied_spans import CopiedSpans
from ragspec.speculation.draft_length import allocate, least_acceptance
from ragspec.speculation.drafters.base import Draft, RowDrafter, propose_all
from ragspec.speculation.drafters.calibration import follow_to, judged
from ragspec.speculation.forced_tokens import ForcedTokens
from ragspec.speculation.method_selector import MethodSelector
from ragspec.speculation.methods import AUTO, VLLM, DrafterSettings, drafters_on, notes_on
from ragspec.speculation.step_cost import FittedCost
from ragspec.structured.grammars import Grammars, Matcher

MAX_UNSEEN = 64  # tokens that a request may generate unseen: near max_model_len, vLLM asks for no drafts
KEEP = 256  # requests kept after they left the batch (finished or preempted), oldest dropped first


@dataclass(slots=True, eq=False)
class Tracked:
    """A request in vLLM's batch. tokens: prompt and answer as far as seen, int32. end: maximum length of both."""

    tokens: np.ndarray
    prompt_tokens: int
    drafters: Mapping[str, RowDrafter]
    copies: CopiedSpans
    end: int
    draft: Draft = field(default_factory=Draft)  # proposed for the next step
    guessed: bytearray = field(default_factory=bytearray)  # per token of the answer: 1 if it was an accepted draft
    grammar: Matcher | None = None  # state of the answer's grammar, if it has one

    def extend(self, fresh: np.ndarray, emitted: int) -> None:
        """Append new tokens. The last `emitted` are from the last step; all of those but the final one were drafts."""
        token_ids = fresh.tolist()
        missed, emission = token_ids[: len(token_ids) - emitted], token_ids[len(token_ids) - emitted :]
        draft = self.draft if not missed else Draft()
        self.copies.note(len(self.tokens) - self.prompt_tokens, draft, token_ids)
        self.guessed += b"\0" * len(missed) + b"\1" * (len(emission) - 1) + b"\0" * bool(emission)
        for drafter in self.drafters.values():
            drafter.extend(token_ids)
        if self.grammar is not None:
            self.grammar.take(token_ids)
        self.tokens = np.concatenate([self.tokens, fresh])
        self.draft = Draft()

    def close(self) -> None:
        """Close the drafters."""
        for drafter in self.drafters.values():
            drafter.close()


class TrackedRequests:
    """The requests that vLLM is answering. open: makes a Tracked from a prompt.

    A request is looked up first in its last slot, then among those that moved or were preempted. Two requests with
    equal tokens so far get the same drafts, so mixing them up is harmless.
    """

    def __init__(self, open: Callable[[np.ndarray], Tracked]) -> None:
        self._open = open
        self._slots: dict[int, Tracked] = {}
        self._away: list[Tracked] = []  # not in the batch, longest away first

    def __len__(self) -> int:
        """Records that it knows, those outside the batch among them."""
        return len(self._slots) + len(self._away)

    def update(
        self, sampled: Sequence[Sequence[int]], lengths: np.ndarray, tokens: np.ndarray
    ) -> tuple[dict[int, Tracked], bool]:
        """Match slots to requests after a step.

        Args:
            sampled: New tokens of each slot, empty while its prompt is incomplete.
            lengths: Tokens of each slot, (slots,).
            tokens: Token ids, (slots, max length).

        Returns:
            The request of each slot that generated tokens; and whether the step did more than decode: it also
            computed prompts (including those of preempted requests), or followed steps that were not seen.
        """
        writing = {slot: int(lengths[slot]) for slot, ids in enumerate(sampled) if len(ids)}
        seen: dict[int, Tracked] = {}
        for slot, length in writing.items():
            row = self._slots.get(slot)
            if row is not None and continues(row, tokens[slot], length - len(sampled[slot])):
                seen[slot] = row
        there, away = set(map(id, seen.values())), set(map(id, self._away))
        # in the batch before, but not recognised in its slot: moved, preempted or finished
        self._away += [row for row in self._slots.values() if id(row) not in there]
        fresh = False
        for slot, length in writing.items():
            before = length - len(sampled[slot])
            row = seen.get(slot) or self._find_away(tokens[slot], before)
            if row is None:
                row, fresh = self._open(tokens[slot, :before].copy()), True
            fresh = fresh or id(row) in away or len(row.tokens) < before
            row.extend(tokens[slot, len(row.tokens) : length].copy(), len(sampled[slot]))
            seen[slot] = row
        self._slots = seen
        while len(self._away) > KEEP:
            self._away.pop(0).close()
        return dict(sorted(seen.items())), fresh or len(writing) < len(sampled)

    def _find_away(self, tokens: np.ndarray, before: int) -> Tracked | None:
        fitting = [row for row in self._away if continues(row, tokens, before)]
        if not fitting:
            return None
        row = max(fitting, key=lambda row: len(row.tokens))
        self._away.remove(row)
        return row

    def finish(self, prompt: np.ndarray, answer: Sequence[int]) -> Tracked | None:
        """Remove, close and return the request that generated `answer`; None if it was never seen."""
        whole = np.concatenate([prompt, np.asarray(answer, dtype=np.int32)])
        for row in self._all():
            length = min(len(row.tokens), len(whole))  # the last step may have run past the end of the answer
            if row.prompt_tokens == len(prompt) < length and np.array_equal(row.tokens[:length], whole[:length]):
                self._slots = {slot: other for slot, other in self._slots.items() if other is not row}
                self._away = [other for other in self._away if other is not row]
                row.close()
                return row
        return None

    def _all(self) -> Iterator[Tracked]:
        yield from sorted([*self._away, *self._slots.values()], key=lambda row: -len(row.tokens))


def continues(row: Tracked, tokens: np.ndarray, before: int) -> bool:
    """Return whether a slot with `before` tokens ahead of this step can hold this request."""
    length = len(row.tokens)
    return before - MAX_UNSEEN <= length <= before and np.array_equal(row.tokens, tokens[:length])


# -- proposer --------------------------------------------------------------------------------------
KEY = "ragspec"  # our key in vLLM's additional_config


@dataclass(frozen=True, slots=True)
class _Expected:
    passages: Sequence[tuple[int, int]] = ()
    drafts: bool = True
    grammar: str = ""
    most: int | None = None  # maximum tokens of the answer


class Proposer:
    """Drafts for vLLM's batch. A runner in the same process announces requests (`expect`) and ends them (`finish`)."""

    def __init__(self, vllm_config: Any) -> None:
        self._settings = vllm_config.additional_config[KEY]
        self._max_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._model_config = vllm_config.model_config
        self._context_length = int(vllm_config.model_config.max_model_len)
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
        self.drafting_s = 0.0
        # no end token: vLLM counts tokens differently once a grammar has consumed one
        self.forced = {name: ForcedTokens(end=False) for name in self._drafters}
        self._expected: dict[bytes, list[_Expected]] = {}  # by prompt tokens
        self._rows = TrackedRequests(self._open)
        self._step_size = (0, 0)  # (tokens, rows) of the step in progress, if it only decodes
        self._step_started = 0.0
        self._own_s = self._propose_s = 0.0  # seconds spent here before that step; the part of it spent on proposing

    def load_model(self, target: Any) -> None:
        """Do nothing; vLLM's CPU build calls this on every proposer."""

    # -- calls of the runner -----------------------------------------------------------------------

    def expect(
        self,
        prompt: Sequence[int],
        passages: Sequence[tuple[int, int]],
        *,
        drafts: bool = True,
        grammar: str = "",
        most: int | None = None,
    ) -> None:
        """Announce a request before it is submitted.

        Args:
            prompt: Its token ids.
            passages: Token spans of the passages in the prompt.
            drafts: Whether to draft for it.
            grammar: Of the answer, "" for none.
            most: Maximum tokens of the answer.
        """
        key = np.asarray(prompt, dtype=np.int32).tobytes()
        self._expected.setdefault(key, []).append(_Expected(passages, drafts, grammar, most))

    @property
    def expected(self) -> int:
        """Prompts that it was told of, and whose answers are not finished."""
        return len(self._expected)

    @property
    def known(self) -> int:
        """Records that it follows, those outside the batch among them."""
        return len(self._rows)

    def finish(self, prompt: Sequence[int], answer: Sequence[int]) -> Tracked | None:
        """Remove a finished request and return what was tracked of it, None if nothing was."""
        ids = np.asarray(prompt, dtype=np.int32)
        key = ids.tobytes()
        if key in self._expected and len(self._expected[key]) > 1:
            self._expected[key].pop()  # another request has the same prompt
        else:
            self._expected.pop(key, None)
        row = self._rows.finish(ids, answer)
        for forced in self.forced.values():
            forced.forget(id(row))
        if row is not None:  # it is not part of the next step
            tokens, rows = self._step_size
            self._step_size = (max(0, tokens - 1 - len(row.draft.token_ids)), max(0, rows - 1))
        return row

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the drafters."""
        return notes_on(self._drafters.values())

    def about(self) -> dict[str, Any]:
        """Return the drafting time and how well the drafters were calibrated."""
        about: dict[str, Any] = {"drafting_s": round(self.drafting_s, 3)}
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

        num_tokens_no_spec and token_ids_cpu are `lengths` and `tokens` of TrackedRequests.update.
        """
        started = time.perf_counter()
        rows, prompts = self._rows.update(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
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

    def _open(self, prompt: np.ndarray) -> Tracked:
        token_ids = prompt.tolist()
        expected = self._expected.get(prompt.tobytes(), [_Expected()])
        passages = expected[0].passages
        wanted = self.trial.candidates if any(one.drafts for one in expected) else ()
        drafters = {
            name: drafter.open(token_ids, passages) for name, drafter in self._drafters.items() if name in wanted
        }
        most = max((one.most or self._context_length for one in expected), default=self._context_length)
        end = min(self._context_length, len(token_ids) + most)
        return Tracked(
            prompt, len(prompt), drafters, CopiedSpans(token_ids, passages), end, grammar=self._matcher(expected)
        )

    def _matcher(self, expected: Sequence[_Expected]) -> Matcher | None:
        """Return the initial state of the answer's grammar; None without one, or if it is ambiguous by the prompt."""
        texts = {one.grammar for one in expected}
        if len(texts) != 1 or not (text := texts.pop()):
            return None
        try:
            return self._grammars.matcher(text)
        except RagspecError:  # vLLM compiles it too, and reports the error for the record
            return None

    @cached_property
    def _grammars(self) -> Grammars:
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer: Any = cached_tokenizer_from_config(self._model_config)
        return Grammars(tokenizer, int(self._model_config.get_vocab_size()), {tokenizer.eos_token_id})

    def _propose_paying(self, method: str, rows: dict[int, Tracked]) -> dict[int, Draft]:
        """Return the drafts of `method` by slot, cut to the length that pays."""
        drafts = self._propose_all(method, rows)
        if self._settings["num_tokens"] is None and drafts:
            chains = [drafts[slot].cumulative_acceptance if slot in drafts else [] for slot in rows]
            lengths = allocate(chains, self.cost, 0)
            drafts = {slot: drafts[slot].cut(n) for slot, n in zip(rows, lengths, strict=True) if n}
        return drafts

    def _propose_all(self, method: str, rows: dict[int, Tracked]) -> dict[int, Draft]:
        if self._settings["num_tokens"] is None:  # stop drafting where no further token could pay
            follow_to(self._drafters[method], least_acceptance(len(rows), self.cost, 0))
        limits = {slot: self._limit(row) for slot, row in rows.items() if method in row.drafters}
        limits = {slot: limit for slot, limit in limits.items() if limit > 0}
        drafters = [rows[slot].drafters[method] for slot in limits]
        drafts = propose_all(self._drafters[method], drafters, list(limits.values()))
        return {
            slot: self._joined(method, rows[slot], draft, limit)
            for (slot, limit), draft in zip(limits.items(), drafts, strict=True)
        }

    def _joined(self, method: str, row: Tracked, draft: Draft, limit: int) -> Draft:
        """Return a draft joined with what the row's grammar forces."""
        if row.grammar is None or row.grammar.ended or row.grammar.problem:
            return draft
        return self.forced[method].join(id(row), row.grammar, draft, limit)

    def _limit(self, row: Tracked) -> int:
        return min(self._settings["num_tokens"] or self._max_tokens, row.end - len(row.tokens) - 1)
