"""What ragspec adds to vLLM's engine, in the process that the engine is in.

    inside = Inside(engine_core, Additions("context", drafts=True, on_cpu=False))
    inside.reset(); ...; inside.report()

Each request that ends takes with it what is known of it: its steps, and which of its tokens were drafts of what.
Source: vLLM 0.32. Limit: what patches/ changes needs the model runner in this process; of an engine whose devices have
processes of their own, only our drafter is reached.
"""

from __future__ import annotations

import json
from time import perf_counter
from typing import Any

from ragspec.runners.vllm.config import Additions
from ragspec.runners.vllm.patches.guarded_drafts import GuardedProposer
from ragspec.runners.vllm.patches.request_ends import tell_at_end
from ragspec.runners.vllm.patches.settling import settle_beside
from ragspec.runners.vllm.patches.steps import ask_always, patch_steps, verified_in, written_in
from ragspec.runners.vllm.patches.undrafted import UndraftedRequests, is_reachable


class Inside:
    """Our part of one engine. core: vLLM's EngineCore."""

    def __init__(self, core: Any, additions: Additions) -> None:
        self._core = core
        self._method = additions.method
        self._proposer: Any = None
        self._guarded: GuardedProposer | None = None
        self._drafts_elsewhere = False  # our proposer, in the devices' processes
        self._ended: dict[str, dict[str, Any]] = {}  # what is known of aborted requests
        self._steps = HostTime()
        scheduler = core.scheduler
        tell_at_end(scheduler, self._known)
        if not is_reachable(core.vllm_config):
            if additions.drafts:
                self._workers("ragspec_follow")
                self._drafts_elsewhere = True
            return
        (model_runner,) = self._workers(lambda worker: worker.model_runner)
        if additions.drafts:
            ask_always(model_runner)
        patch_steps(scheduler, model_runner)
        UndraftedRequests(scheduler, model_runner, on_cpu=additions.on_cpu)
        if additions.drafts:
            self._proposer = model_runner.drafter
            self._proposer.follow(model_runner)
            settle_beside(model_runner, self._proposer)
        if additions.pauses is not None:
            self._guarded = GuardedProposer(core, model_runner, pauses=additions.pauses)
        self._steps.watch(scheduler)

    def _workers(self, call: Any) -> list[Any]:
        found: list[Any] = self._core.model_executor.collective_rpc(call)
        return found

    def reset(self) -> None:
        """Forget all measurements, as for a new run."""
        self._ended.clear()
        self._steps.reset()
        for part in (self._proposer, self._guarded):
            if part is not None:
                part.reset()
        if self._drafts_elsewhere:
            self._workers("ragspec_reset")

    def report(self) -> dict[str, Any]:
        """Return statistics and notes on the drafts since the last reset, of JSON's types."""
        about, notes = {}, []
        if self._proposer is not None:
            about, notes = self._proposer.about(), self._proposer.notes
        elif self._drafts_elsewhere:
            about, notes = next((each for each in self._workers("ragspec_report") if each), ({}, []))
        elif self._guarded is not None:
            about, notes = self._guarded.about(), list(filter(None, [self._guarded.note(self._method)]))
        report: dict[str, Any] = json.loads(json.dumps({"about": about, "notes": notes}, default=float))
        return report

    def progress(self) -> dict[str, Any]:
        """Return the speed of steps with drafts relative to plain ones, None while unknown, and the host's share."""
        ratio = None
        if self._proposer is not None:
            ratio = (self._proposer.about().get("guard") or {}).get("ratio")
        return {"ratio": ratio, "host_share": self._steps.share, "steps": self._steps.count}

    def ended(self, name: str) -> dict[str, Any]:
        """Return what is known of a request that was aborted, and forget it."""
        return self._ended.pop(name, {})

    def _known(self, request: Any) -> dict[str, Any]:
        row = self._proposer.finish(request.request_id) if self._proposer is not None else None
        metrics = request.spec_decode_metrics
        known: dict[str, Any] = {"steps": written_in(metrics)}
        if row is not None:
            known["accepted"] = row.accepted
        if request.status.name == "FINISHED_ABORTED":  # it has no last output, which the metrics would come with
            self._ended[request.request_id] = known | {"verified": verified_in(metrics)}
        return known


class HostTime:
    """How much of an engine's steps its scheduler takes, all of which waits for it unless it is asynchronous."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self.count = 0
        self._host_s = self._all_s = self._began = 0.0

    @property
    def share(self) -> float:
        """The scheduler's share of the seconds of all steps."""
        return self._host_s / self._all_s if self._all_s else 0.0

    def watch(self, scheduler: Any) -> None:
        """Time a scheduler."""
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def timed_schedule(*arguments: Any, **named: Any) -> Any:
            self._began = perf_counter()
            scheduled = schedule(*arguments, **named)
            self._host_s += perf_counter() - self._began
            return scheduled

        def timed_update(*arguments: Any, **named: Any) -> Any:
            began = perf_counter()
            outputs = update(*arguments, **named)
            ended = perf_counter()
            self._host_s += ended - began
            self._all_s += ended - self._began
            self.count += 1
            return outputs

        scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update


class WorkerExtension:
    """Mixed into vLLM's workers, whose processes have no other door. Source: vLLM 0.32, v1/worker/worker_base.py."""

    model_runner: Any

    @property
    def _proposer(self) -> Any:
        """Our proposer; None in a stage of a pipeline that is not the last."""
        return getattr(self.model_runner, "drafter", None)

    def ragspec_follow(self) -> None:
        """Let our proposer follow the requests of its model runner."""
        if self._proposer is not None:
            ask_always(self.model_runner)
            self._proposer.follow(self.model_runner)

    def ragspec_reset(self) -> None:
        """Let our proposer forget all requests and measurements."""
        if self._proposer is not None:
            self._proposer.reset()

    def ragspec_report(self) -> tuple[dict[str, Any], list[str]] | None:
        """Return our proposer's statistics and notes, None without one."""
        return None if self._proposer is None else (self._proposer.about(), self._proposer.notes)
