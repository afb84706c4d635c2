"""Which record is in which slot of vLLM's batch: vLLM hands over token ids only, and moves records between steps.

A record is recognised by its tokens: first in its own slot, then among the records that were moved, or preempted and
brought back. Two records with the same tokens so far get the same drafts, whichever is taken for which.
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
from ragspec.speculation.drafters.base import Draft, RowDrafter
from ragspec.speculation.drafters.calibration import follow_to, judged
from ragspec.speculation.forced_tokens import ForcedTokens
from ragspec.speculation.method_selector import MethodSelector
from ragspec.speculation.methods import AUTO, VLLM, DrafterSettings, drafters_on, failures
from ragspec.speculation.step_cost import FittedCost
from ragspec.structured.grammars import Grammars, Matcher

SKIPPED = 64  # tokens that a record may write unseen: near its model length, vLLM asks for no drafts
KEEP = 256  # records outside the batch, finished or preempted, before the oldest is given up


@dataclass(slots=True, eq=False)
class Tracked:
    """A record in vLLM's batch. tokens: prompt and answer as far as seen, int32. end: how many there may be."""

    tokens: np.ndarray
    prompt_tokens: int
    drafters: Mapping[str, RowDrafter]
    copies: CopiedSpans
    end: int
    draft: Draft = field(default_factory=Draft)  # what was proposed for the coming tokens
    guessed: bytearray = field(default_factory=bytearray)  # per token of the answer: 1 where a draft had it
    grammar: Matcher | None = None  # where its answer is in its grammar, where it has one

    def extend(self, fresh: np.ndarray, emitted: int) -> None:
        """Take in new tokens; the last `emitted` are the last step's, and all but one of these were drafts."""
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
        """Close its drafters: it is finished."""
        for drafter in self.drafters.values():
            drafter.close()


class TrackedRequests:
    """The records that vLLM is answering. open: makes a Tracked of a prompt."""

    def __init__(self, open: Callable[[np.ndarray], Tracked]) -> None:
        self._open = open
        self._slots: dict[int, Tracked] = {}
        self._away: list[Tracked] = []  # not in the batch; longest away first

    def update(
        self, sampled: Sequence[Sequence[int]], lengths: np.ndarray, tokens: np.ndarray
    ) -> tuple[dict[int, Tracked], bool]:
        """Return the record of every slot that wrote, and whether the step was more than one of decoding.

        It was if it computed prompts, those of preempted records too, or if it came after others that nobody saw.
        sampled: per slot the tokens just written, none where a prompt is not complete yet. lengths: (slots,) tokens of
        each. tokens: (slots, most tokens) ids.
        """
        writing = {slot: int(lengths[slot]) for slot, ids in enumerate(sampled) if len(ids)}
        seen: dict[int, Tracked] = {}
        for slot, length in writing.items():
            row = self._slots.get(slot)
            if row is not None and _continues(row, tokens[slot], length - len(sampled[slot])):
                seen[slot] = row
        there, away = set(map(id, seen.values())), set(map(id, self._away))
        # in the batch before but not recognised in its slot: it moved, was preempted, or is finished
        self._away += [row for row in self._slots.values() if id(row) not in there]
        fresh = False
        for slot, length in writing.items():
            before = length - len(sampled[slot])
            row = seen.get(slot) or self._came_back(tokens[slot], before)
            if row is None:
                row, fresh = self._open(tokens[slot, :before].copy()), True
            fresh = fresh or id(row) in away or len(row.tokens) < before
            row.extend(tokens[slot, len(row.tokens) : length].copy(), len(sampled[slot]))
            seen[slot] = row
        self._slots = seen
        while len(self._away) > KEEP:
            self._away.pop(0).close()
        return dict(sorted(seen.items())), fresh or len(writing) < len(sampled)

    def _came_back(self, tokens: np.ndarray, before: int) -> Tracked | None:
        fitting = [row for row in self._away if _continues(row, tokens, before)]
        if not fitting:
            return None
        row = max(fitting, key=lambda row: len(row.tokens))
        self._away.remove(row)
        return row

    def finish(self, prompt: np.ndarray, answer: Sequence[int]) -> Tracked | None:
        """Return, close and forget the record that wrote `answer`; None where it was never seen writing."""
        whole = np.concatenate([prompt, np.asarray(answer, dtype=np.int32)])
        for row in self._all():
            length = min(len(row.tokens), len(whole))  # the last step may have written beyond its end
            if row.prompt_tokens == len(prompt) < length and np.array_equal(row.tokens[:length], whole[:length]):
                self._slots = {slot: other for slot, other in self._slots.items() if other is not row}
                self._away = [other for other in self._away if other is not row]
                row.close()
                return row
        return None

    def _all(self) -> Iterator[Tracked]:
        yield from sorted([*self._away, *self._slots.values()], key=lambda row: -len(row.tokens))


def _continues(row: Tracked, tokens: np.ndarray, before: int) -> bool:
    """Return whether a slot whose first `before` tokens are not of this step can be this record."""
    length = len(row.tokens)
    return before - SKIPPED <= length <= before and np.array_equal(row.tokens, tokens[:length])


# -- our drafters inside vLLM: the class that it loads for `speculative_config={"method": "custom_class", ...}
#
#     additional_config={"ragspec": {"method": "context", "num_tokens": None, "drafting": {"isolate": False}}}
#
# Drafts are as long as pays, by calibrated survival and by the seconds of vLLM's own steps: the rule of our own engine.
# Source: vLLM 0.32, v1/spec_decode/custom_class_proposer.py. Limit: Python for every row and step, some 0.1 ms each.


KEY = "ragspec"  # of our settings in vLLM's additional_config


@dataclass(frozen=True, slots=True)
class _Expected:
    passages: Sequence[tuple[int, int]] = ()
    drafts: bool = True
    grammar: str = ""
    most: int | None = None  # tokens of its answer


class Proposer:
    """Drafts for vLLM's batch. A runner that can reach it tells it of requests (`expect`) and their end (`finish`)."""

    def __init__(self, vllm_config: Any) -> None:
        self._settings = vllm_config.additional_config[KEY]
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._model_config = vllm_config.model_config
        self._context_length = int(vllm_config.model_config.max_model_len)
        self.reset()

    def reset(self) -> None:
        """Forget everything: a run starts as a fresh one does."""
        method = self._settings["method"]
        self._drafters = drafters_on(VLLM, method, DrafterSettings(**self._settings["drafting"]))
        self.trial = MethodSelector(list(self._drafters) if method == AUTO else [method])
        self.cost = FittedCost()
        # what is expected of plain steps: the shape that it begins with, for it never learns
        self._plain = FittedCost()
        self._judged = method == AUTO or self._settings["num_tokens"] is None
        self.drafting_s = 0.0
        # without the end: vLLM counts its tokens differently once a grammar has taken one
        self.forced = {name: ForcedTokens(end=False) for name in self._drafters}
        self._expected: dict[bytes, list[_Expected]] = {}  # by the prompt's tokens
        self._rows = TrackedRequests(self._open)
        self._asked = (0, 0)  # tokens and rows of the step under way, if it only decodes
        self._since = 0.0  # when that step began
        self._spent = self._asking_s = 0.0  # seconds that we took before it, and those of them that asking did

    def load_model(self, target: Any) -> None:
        """Do nothing: vLLM's CPU build asks every proposer to load."""

    # -- what the runner tells ---------------------------------------------------------------------

    def expect(
        self,
        prompt: Sequence[int],
        passages: Sequence[tuple[int, int]],
        *,
        drafts: bool = True,
        grammar: str = "",
        most: int | None = None,
    ) -> None:
        """Take in where the passages are in a prompt, before it is answered. drafts: whether any are wanted for it.

        grammar: of its answer, "" where it has none. most: tokens that the answer may have.
        """
        key = np.asarray(prompt, dtype=np.int32).tobytes()
        self._expected.setdefault(key, []).append(_Expected(passages, drafts, grammar, most))

    def finish(self, prompt: Sequence[int], answer: Sequence[int]) -> Tracked | None:
        """Return what is known of a finished answer, None where nothing is."""
        ids = np.asarray(prompt, dtype=np.int32)
        key = ids.tobytes()
        if key in self._expected and len(self._expected[key]) > 1:
            self._expected[key].pop()  # another record has the same prompt
        else:
            self._expected.pop(key, None)
        row = self._rows.finish(ids, answer)
        for forced in self.forced.values():
            forced.forget(id(row))
        if row is not None:  # it has no part in the step to come
            tokens, rows = self._asked
            self._asked = (max(0, tokens - 1 - len(row.draft.token_ids)), max(0, rows - 1))
        return row

    @property
    def notes(self) -> list[str]:
        """What the user should know of the drafters."""
        return failures(self._drafters.values())

    def about(self) -> dict[str, Any]:
        """Return what the drafts cost and how well they were calibrated."""
        about: dict[str, Any] = {"drafting_s": round(self.drafting_s, 3)}
        if self._judged:
            found = self.trial.about()
            about |= found if self._settings["method"] == AUTO else {"guard": found["guard"]}
        return about | judged(self._drafters.get(self.trial.chosen))

    # -- what vLLM asks ----------------------------------------------------------------------------

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return drafts per slot, after a step. sampled_token_ids: what each slot wrote; the rest as in rows.py."""
        started = time.perf_counter()
        rows, prompts = self._rows.update(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        written = sum(len(ids) for ids in sampled_token_ids)
        for slot, row in rows.items():
            if row.grammar is not None:
                for forced in self.forced.values():
                    forced.score(id(row), sampled_token_ids[slot])
        if all(self._asked) and not prompts and written:
            seconds = started - self._since
            self.cost.observe(*self._asked, seconds)
            tokens, before = self._asked
            seconds, expected = seconds + self._spent, self._plain(before, before)
            self.trial.observe(before, tokens - before, written, seconds, expected, self._asking_s)
        drafts: dict[int, Draft] = {}
        count = len(rows)
        self._asking_s = 0.0
        if rows and (not self._judged or self.trial.allows(count, self._plain(count, count), mixed=bool(prompts))):
            asked = time.perf_counter()
            drafts = self.trial.ask(lambda name: self._choose(name, rows), lambda name: self._guess(name, rows))
            self._asking_s = time.perf_counter() - asked
        proposed: list[list[int]] = [[] for _ in sampled_token_ids]
        for slot, draft in drafts.items():
            rows[slot].draft = draft
            proposed[slot] = draft.token_ids
        self._asked = (len(rows) + sum(len(draft.token_ids) for draft in drafts.values()), len(rows))
        self._since = time.perf_counter()
        self._spent = self._since - started
        self.drafting_s += self._spent
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
        """Return the beginning of an answer's grammar; None where it has none, or another record's is unlike it."""
        texts = {one.grammar for one in expected}
        if len(texts) != 1 or not (text := texts.pop()):
            return None
        try:
            return self._grammars.matcher(text)
        except RagspecError:  # vLLM compiles it too, and says so of the record
            return None

    @cached_property
    def _grammars(self) -> Grammars:
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer: Any = cached_tokenizer_from_config(self._model_config)
        return Grammars(tokenizer, int(self._model_config.get_vocab_size()), {tokenizer.eos_token_id})

    def _choose(self, method: str, rows: dict[int, Tracked]) -> dict[int, Draft]:
        """Return the drafts of `method` by slot, no longer than pays."""
        drafts = self._guess(method, rows)
        if self._settings["num_tokens"] is None and drafts:
            chains = [drafts[slot].survival if slot in drafts else [] for slot in rows]
            lengths = allocate(chains, self.cost, 0)
            drafts = {slot: drafts[slot].cut(n) for slot, n in zip(rows, lengths, strict=True) if n}
        return drafts

    def _guess(self, method: str, rows: dict[int, Tracked]) -> dict[int, Draft]:
        if self._settings["num_tokens"] is None:  # chains end where nothing can pay any more
            follow_to(self._drafters[method], least_acceptance(len(rows), self.cost, 0))
        limits = {slot: self._limit(row) for slot, row in rows.items() if method in row.drafters}
        return {slot: self._guess_one(method, rows[slot], limit) for slot, limit in limits.items() if limit > 0}

    def _guess_one(self, method: str, row: Tracked, limit: int) -> Draft:
        draft = row.drafters[method].propose(limit)
        if row.grammar is None or row.grammar.ended or row.grammar.problem:
            return draft
        return self.forced[method].join(id(row), row.grammar, draft, limit)

    def _limit(self, row: Tracked) -> int:
        return min(self._settings["num_tokens"] or self._most, row.end - len(row.tokens) - 1)
