"""Our drafters inside vLLM: the class that it loads for `speculative_config={"method": "custom_class", ...}`.

    additional_config={"ragspec": {"method": "context", "num_tokens": None, "drafting": {"isolate": False}}}

Drafts are as long as pays, by calibrated survival and by the seconds of vLLM's own steps: the rule of our own engine.
Source: vLLM 0.32, v1/spec_decode/custom_class_proposer.py. Limit: Python for every row and step, some 0.1 ms each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ragspec.errors import RagspecError
from ragspec.runners.vllm.rows import Rows, Tracked
from ragspec.speculation.allocate import allocate, least_survival
from ragspec.speculation.citations import Copies
from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.drafters.calibration import follow_to, judged
from ragspec.speculation.fitted_cost import FittedCost
from ragspec.speculation.forced import Forced
from ragspec.speculation.methods import AUTO, VLLM, DrafterSettings, drafters_on
from ragspec.speculation.plugins import failures
from ragspec.speculation.trial import Trial
from ragspec.structured.grammars import Grammars, Matcher

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
        self.trial = Trial(list(self._drafters) if method == AUTO else [method])
        self.cost = FittedCost()
        # what is expected of plain steps: the shape that it begins with, for it never learns
        self._plain = FittedCost()
        self._judged = method == AUTO or self._settings["num_tokens"] is None
        self.drafting_s = 0.0
        # without the end: vLLM counts its tokens differently once a grammar has taken one
        self.forced = {name: Forced(end=False) for name in self._drafters}
        self._expected: dict[bytes, list[_Expected]] = {}  # by the prompt's tokens
        self._rows = Rows(self._open)
        self._asked = (0, 0)  # tokens and rows of the step under way, if it only decodes
        self._since = 0.0  # when that step began
        self._spent = self._asking_s = 0.0  # seconds that we took before it, and those of them that asking did

    def load_model(self, target: Any) -> None:
        """Do nothing: vLLM's CPU build asks every proposer to load."""

    # -- what the runner tells ------------------------------------------------------------------------------------

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

    @property
    def expected(self) -> int:
        """Prompts that it was told of, and whose answers are not finished."""
        return len(self._expected)

    @property
    def known(self) -> int:
        """Records that it follows, those outside the batch among them."""
        return len(self._rows)

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

    # -- what vLLM asks -------------------------------------------------------------------------------------------

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
        return Tracked(prompt, len(prompt), drafters, Copies(token_ids, passages), end, grammar=self._matcher(expected))

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
            follow_to(self._drafters[method], least_survival(len(rows), self.cost, 0))
        limits = {slot: self._limit(row) for slot, row in rows.items() if method in row.drafters}
        return {slot: self._guess_one(method, rows[slot], limit) for slot, limit in limits.items() if limit > 0}

    def _guess_one(self, method: str, row: Tracked, limit: int) -> Draft:
        draft = row.drafters[method].propose(limit)
        if row.grammar is None or row.grammar.ended or row.grammar.problem:
            return draft
        return self.forced[method].join(id(row), row.grammar, draft, limit)

    def _limit(self, row: Tracked) -> int:
        return min(self._settings["num_tokens"] or self._most, row.end - len(row.tokens) - 1)
