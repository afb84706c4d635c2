"""Time the steps of vLLM's own drafters, and pause drafting while it makes steps slower.

    guarded = GuardedProposer(core, model_runner, pauses=True)

During a pause vLLM is told that the batch does not fit its drafter, a case that it handles. For a single plain step the
drafter still runs, so that its KV cache has no gap, and its drafts are dropped. Batches with sampled records are left
alone, or their text would depend on timing. Steps that compute prompts are not compared, so the first ones go without
drafts until other steps have shown whether drafts pay. Source: vLLM 0.32, v1/worker/gpu_model_runner.py
(sample_tokens), v1/core/sched/scheduler.py. Limits: those of undrafted.py; rows answered during a pause have gaps in
the drafter's KV cache and get worse drafts afterwards.
"""

from __future__ import annotations

import time
from typing import Any

from ragspec.runners.vllm.patches import Patch
from ragspec.runners.vllm.patches.undrafted import drop_drafts
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
    versions=("0.32", "0.33"),
    why="vLLM drafts even where its drafts make steps slower",
    upstream="https://github.com/vllm-project/vllm/issues/6993",
    until="vLLM chooses draft lengths by what steps take",
)
BLIND = 32  # maximum steps with prompts that go without drafts because nothing is known yet


class GuardedProposer:
    """Wraps one engine. pauses: whether drafts are paused, or only timed."""

    def __init__(self, core: Any, model_runner: Any, *, pauses: bool) -> None:
        self._pauses = pauses
        spec = model_runner.speculative_config
        self._has_kv_cache = bool(spec.use_eagle() or spec.uses_draft_model())  # of the drafter itself
        # expected cost of plain steps: the initial shape, never fitted
        self._plain = FittedCost()
        self.reset()
        self._time_steps(model_runner)
        self._gate_drafter(model_runner)
        drop_drafts(core.scheduler, lambda _: self._dropping)

    def reset(self) -> None:
        """Forget all measurements, as for a new run."""
        self._guard = SpeculationGuard()
        self._rows = self._drafted = 0  # rows of the step in progress; draft tokens that it verifies
        self._prompts = self._dropping = False
        self._unknown_steps = 0  # steps that went without drafts because nothing was known yet
        self._step_started = 0.0
        self._draft_s = self._next_draft_s = 0.0  # seconds to draft for this step, if its drafts are used; for the next

    def about(self) -> dict[str, Any]:
        """Return the guard's statistics."""
        return {"guard": self._guard.about()}

    def note(self, method: str) -> str:
        """Return a note for the user if drafts were a loss, or ""."""
        found = self._guard.about()
        if not found["pauses"]:
            return ""
        slower = f"method {method}: steps with drafts were clearly slower than plain ones, {found['pauses']} times"
        if self._pauses:
            return f"{slower}; {found['paused_steps']} steps did without them"
        return f"{slower}; leave out num_tokens to have them paused, or use method: none or context"

    def _time_steps(self, model_runner: Any) -> None:
        """Wrap the model runner to time each step and its drafting, and to count tokens."""
        execute, sample = model_runner.execute_model, model_runner.sample_tokens
        propose = model_runner.propose_draft_token_ids

        def timed_execute(scheduled: Any, *rest: Any, **named: Any) -> Any:
            self._begin(scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens)
            return execute(scheduled, *rest, **named)

        def timed_propose(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            drafts = propose(*arguments, **named)
            self._next_draft_s = time.perf_counter() - started
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
        """Start timing a step. tokens, drafts: scheduled for each request, by id."""
        spent = 0.0 if self._dropping else self._next_draft_s
        self._step_started, self._draft_s, self._next_draft_s = time.perf_counter(), spent, 0.0
        self._rows = len(tokens)
        self._drafted = sum(len(draft) for draft in drafts.values())
        self._prompts = any(count > 1 + len(drafts.get(name, ())) for name, count in tokens.items())

    def _end(self, written: int) -> None:
        """Report the step to the guard. written: tokens that it generated."""
        if self._rows and not self._prompts:
            seconds = time.perf_counter() - self._step_started - self._next_draft_s + self._draft_s
            expected = self._plain(self._rows, self._rows)
            self._guard.observe(self._rows, self._drafted, written, seconds, expected, self._draft_s)

    def _gate_drafter(self, model_runner: Any) -> None:
        """Let the guard decide whether the next step drafts, where vLLM asks whether the batch fits its drafter."""
        fits = model_runner._input_fits_in_drafter

        def fits_and_pays(*arguments: Any) -> bool:
            self._dropping = False
            if not fits(*arguments):
                return False
            if not self._rows or not model_runner.input_batch.sampling_metadata.all_greedy:
                return True
            paused = self._guard.pausing
            allowed = self._guard.allows(self._rows, self._plain(self._rows, self._rows), self._prompts)
            self._dropping = self._skips_unknown() or (not allowed and (self._pauses or not paused))
            return not (self._dropping and self._has_kv_cache and self._guard.pausing)

        model_runner._input_fits_in_drafter = fits_and_pays

    def _skips_unknown(self) -> bool:
        """Return whether to go without drafts because the next step likely computes prompts and nothing is known."""
        waits = self._pauses and self._prompts and not self._guard.knows and self._unknown_steps < BLIND
        self._unknown_steps += waits
        return waits
