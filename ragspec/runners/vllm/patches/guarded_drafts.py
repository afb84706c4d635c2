"""vLLM's own drafters, judged by the seconds of its steps and paused while they lose.

    guarded = Guarded.within(engine, pauses=True)        # None where the engine cannot be reached

While drafts are paused, vLLM is told that the batch does not fit its drafter, a case that it knows. For a single plain
step the drafter runs all the same, so that its keys and values have no gap, and what it drafts is dropped. Batches
that sample are left alone, or a clock would decide on their text. Steps that compute prompts teach nothing, so the
first ones go without drafts until other steps have shown what these are worth. Source: vLLM 0.32,
v1/worker/gpu_model_runner.py (sample_tokens), v1/core/sched/scheduler.py. Limits: those of undrafted.py; rows that
were answered during a pause have gaps in the drafter's cache, and are guessed worse after it.
"""

from __future__ import annotations

import time
from typing import Any, Self

from ragspec.runners.vllm.patches import Patch
from ragspec.runners.vllm.patches.undrafted import drop_drafts, reached
from ragspec.speculation.speculation_guard import SpeculationGuard
from ragspec.speculation.step_cost import FittedCost

PATCH = Patch(
    changes=(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._input_fits_in_drafter",
        "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
    ),
    versions="0.32",
    why="vLLM drafts even where its drafts make steps slower",
    upstream="https://github.com/vllm-project/vllm/issues/6993",
    until="vLLM chooses draft lengths by what steps take",
)
BLIND = 32  # steps that compute prompts and go without drafts, as long as nobody knows what those are worth


class GuardedProposer:
    """What has been changed in an engine. pauses: whether drafts are paused, or only judged."""

    def __init__(self, core: Any, model_runner: Any, *, pauses: bool) -> None:
        self._pauses = pauses
        spec = model_runner.speculative_config
        self._reads = bool(spec.use_eagle() or spec.uses_draft_model())  # a drafter with keys and values of its own
        # what is expected of plain steps: the shape that it begins with, for it never learns
        self._plain = FittedCost()
        self.reset()
        self._watch(model_runner)
        self._decide(model_runner)
        drop_drafts(core.scheduler, lambda _: self._dropping)

    @classmethod
    def within(cls, engine: Any, *, pauses: bool) -> Self | None:
        """Return what judges the drafts of an engine that speculates, None where it cannot be reached."""
        found = reached(engine)
        return cls(*found, pauses=pauses) if found else None

    def reset(self) -> None:
        """Forget everything: a run starts as a fresh one does."""
        self._guard = SpeculationGuard()
        self._rows = self._drafted = 0  # of the step under way; tokens of drafts that it verifies
        self._prompts = self._dropping = False
        self._blind = 0  # steps that went without drafts as nothing was known of them
        self._since = 0.0  # when it began
        self._spent = self._spending = 0.0  # seconds that its drafts took, if wanted, and that those of the next one do

    def about(self) -> dict[str, Any]:
        """Return what the statistics say."""
        return {"guard": self._guard.about()}

    def note(self, method: str) -> str:
        """Return what the user should know, "" if drafts were no loss."""
        found = self._guard.about()
        if not found["pauses"]:
            return ""
        slower = f"method {method}: steps with drafts were clearly slower than plain ones, {found['pauses']} times"
        if self._pauses:
            return f"{slower}; {found['paused_steps']} steps did without them"
        return f"{slower}; leave out num_tokens to have them paused, or use method: none or context"

    def _watch(self, model_runner: Any) -> None:
        """Take the time of each step, of its drafts too, and count what it does."""
        execute, sample = model_runner.execute_model, model_runner.sample_tokens
        propose = model_runner.propose_draft_token_ids

        def timed_execute(scheduled: Any, *rest: Any, **named: Any) -> Any:
            self._begin(scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens)
            return execute(scheduled, *rest, **named)

        def timed_propose(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            drafts = propose(*arguments, **named)
            self._spending = time.perf_counter() - started
            return drafts

        def timed_sample(*arguments: Any, **named: Any) -> Any:
            output = sample(*arguments, **named)
            written = getattr(output, "sampled_token_ids", None)
            if written:
                self._end(sum(len(token_ids) for token_ids in written))
            return output

        model_runner.execute_model = timed_execute
        model_runner.sample_tokens = timed_sample
        model_runner.propose_draft_token_ids = timed_propose

    def _begin(self, tokens: dict[str, int], drafts: dict[str, list[int]]) -> None:
        """A step begins. tokens, drafts: of its records, by name."""
        spent = 0.0 if self._dropping else self._spending
        self._since, self._spent, self._spending = time.perf_counter(), spent, 0.0
        self._rows = len(tokens)
        self._drafted = sum(len(draft) for draft in drafts.values())
        self._prompts = any(count > 1 + len(drafts.get(name, ())) for name, count in tokens.items())

    def _end(self, written: int) -> None:
        """The step wrote so many tokens."""
        if self._rows and not self._prompts:
            seconds = time.perf_counter() - self._since - self._spending + self._spent
            expected = self._plain(self._rows, self._rows)
            self._guard.observe(self._rows, self._drafted, written, seconds, expected, self._spent)

    def _decide(self, model_runner: Any) -> None:
        """Let the guard say whether the next step drafts, where vLLM asks whether its drafter has room."""
        fits = model_runner._input_fits_in_drafter

        def fits_and_pays(*arguments: Any) -> bool:
            self._dropping = False
            if not fits(*arguments):
                return False
            if not self._rows or not model_runner.input_batch.sampling_metadata.all_greedy:
                return True
            paused = self._guard.pausing
            allowed = self._guard.allows(self._rows, self._plain(self._rows, self._rows), self._prompts)
            self._dropping = self._waits() or (not allowed and (self._pauses or not paused))
            return not (self._dropping and self._reads and self._guard.pausing)

        model_runner._input_fits_in_drafter = fits_and_pays

    def _waits(self) -> bool:
        """Return whether the next step goes without drafts as it probably computes prompts, and nothing is known."""
        waits = self._pauses and self._prompts and not self._guard.knows and self._blind < BLIND
        self._blind += waits
        return waits
