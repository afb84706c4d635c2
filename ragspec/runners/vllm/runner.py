"""The vLLM runner: records stream in, answers stream out, and one bad record stops nothing.

    runner: vllm
    runner_args: {max_model_len: 4096, gpu_memory_utilization: 0.9}     # any argument of LLM(...)

Limit: one engine; several GPUs by tensor_parallel_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from time import perf_counter
from typing import Any, Self

from ragspec.config.io import InputConfig
from ragspec.config.redaction import revealed
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError, ModelError
from ragspec.inputs.sources import known_rows
from ragspec.models.resolve import context_length
from ragspec.records import Failure, Generation, Request, Sampling
from ragspec.runners.vllm.args import Args
from ragspec.runners.vllm.config import is_ours, one_line
from ragspec.runners.vllm.engine import Engine, EngineDied
from ragspec.runners.vllm.modes import LEAST_STEPS, OURS, ModeRun, first_mode, read_runs, remember_run, worth_restarting
from ragspec.runners.vllm.patches.seeds import patch_seeds
from ragspec.runners.vllm.plan import Plan
from ragspec.runners.vllm.stream import Stream
from ragspec.speculation.methods import AUTO, PLAIN, VLLM, find, method_named

__all__ = ["Args", "Runner"]
# vLLM's n-grams on the GPU, which have no word of ours
NGRAM_GPU = {"method": "ngram_gpu", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
LEAST_TOKENS = 2000  # of answers, for a run to say how fast its mode is


class Runner:
    """Answers with one vLLM engine."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._plan = Plan(config)
        self._plain: Plan | None = None  # what a run may be restarted with
        self._mode = ""  # with method auto, the one that answers
        self._modes: dict[str, Any] = {}  # what was expected of each, and what came
        self._expected_records: int | None = None
        self._load_s = self._began = 0.0  # seconds that the engine took to start; when the run began
        self._running: Engine | None = None
        self.method = self._plan.method
        self.remembers = not config.speculation.speculative_config and VLLM in method_named(self.method).remembers
        self.cites = is_ours(self.method)
        self._drafting: dict[str, Any] = {}  # statistics of the latest run's drafts
        self._notes: list[str] = []
        self._judgement: list[str] = []  # notes of the latest run
        self.prefill_s: float | None = None  # unknown: prefill and decoding share the engine's steps
        self.decode_s: float | None = None
        self.decode_tokens = 0
        self.peak_elsewhere = (0, 0)  # of the engine's own process

    def check(self) -> None:
        """Find the model, draft and tokenizers, and let vLLM validate its configuration. Raises ConfigError."""
        plan = self._plan
        plan.check()
        self._notes += plan.notes
        self.cites = is_ours(plan.method) and plan.undraftable
        if is_ours(plan.method) and not plan.undraftable:
            self._notes.append(
                f"method {plan.method}: vLLM runs each device in its own process, so no passage is cited"
            )
        self.method, self.tokenizer = plan.method, plan.tokenizer
        self.context_length: int | None = plan.context_length
        if plan.method == AUTO:
            self._choose_mode()

    def _choose_mode(self) -> None:
        """Choose the mode to start in; plain vLLM is one where it schedules asynchronously, as our drafter cannot."""
        known = read_runs(self._plan.settings())
        plain = self._plain_beside()
        able = {mode: runs for mode, runs in known.items() if mode in (PLAIN, OURS) or self._can_run(mode)}
        rows = at_once(self._config.input, self._plan.rows)
        self._mode, expected = first_mode(rows, asynchronous=plain is not None, known=able)
        chosen = self._plan
        if self._mode != OURS:
            try:
                chosen = plain if plain is not None and self._mode == PLAIN else self._planned(self._mode)
            except ConfigError as error:  # it ran here once, and lacks something now
                self._notes.append(f"method auto: {self._mode} was fastest here, but {error}")
                self._mode = OURS
        self._modes = {"first": self._mode, "expected": expected}
        if self._mode != OURS:
            self._plan, self.cites = chosen, False
            row = find(_method(self._mode))
            self.remembers = row is not None and VLLM in row.remembers
            self._notes.append(f"method auto: starts with {self._mode}, expected to be fastest with {rows} at once")
        else:
            self._plain = plain

    def _plain_beside(self) -> Plan | None:
        """Return plain vLLM's plan, None where it schedules as an engine with drafts does."""
        if self._plan.on_cpu:
            return None
        plain = self._planned(PLAIN)
        return plain if plain.asynchronous else None

    def _can_run(self, mode: str) -> bool:
        """Return whether a mode that ran here before needs nothing that the config lacks."""
        if mode == NGRAM_GPU["method"]:
            return not self._plan.on_cpu
        row, spec = find(_method(mode)), self._config.speculation
        if row is None or VLLM not in row.runners or mode != _mode_of(_method(mode), spec.draft_model):
            return False
        return all(getattr(spec, key) for key in row.needs)

    def _planned(self, method: str) -> Plan:
        """Return the checked plan of another method."""
        change: dict[str, Any] = {"method": _method(method)}
        if method == NGRAM_GPU["method"]:
            change = {"method": "speculative_config", "speculative_config": NGRAM_GPU}
        spec = self._config.speculation.model_copy(update=change)
        plan = Plan(self._config.model_copy(update={"speculation": spec}))
        plan.check()
        return plan

    @property
    def engine(self) -> Any:
        """vLLM's LLMEngine, while there is one."""
        return self._running.inner if self._running is not None else None

    @property
    def engine_args(self) -> dict[str, Any]:
        """What vLLM's engine is made with, once check() is done; secrets are veiled."""
        return self._plan.engine_args

    def __enter__(self) -> Self:
        plan, began = self._plan, perf_counter()
        if plan.on_cpu and plan.is_tried() and not plan.own_process:
            patch_seeds()
        try:
            self._running = Engine(revealed(plan.engine_args), own_process=plan.own_process, additions=plan.additions)
        except Exception as error:  # anything may stop an engine from starting
            with_method = "" if self.method == PLAIN else f" with method {self.method}"
            raise ModelError(
                f'"{plan.model_name}": vLLM could not start{with_method}: {one_line(error)} '
                "(if memory is short: lower runner_args.max_model_len, or choose a smaller model)"
            ) from error
        self._load_s = perf_counter() - began
        return self

    def __exit__(self, *exc: object) -> None:
        engine, self._running = self._running, None
        if engine is not None:
            engine.close()

    def warm_up(self, records: int | None = None) -> None:
        """Answer a short prompt, so that the first record does not pay for lazy initialisation."""
        self._expected_records = records
        ids = self.tokenizer.encode("one two three one two three one two", special_tokens=True)
        for _ in self._stream(lambda finished: None).run([Request(-1, "warm-up", ids, Sampling(max_new_tokens=8))]):
            pass

    def generate(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield outcomes as they finish, with a bounded number of requests in flight."""
        self._judgement, self._began, first = [], perf_counter(), self._plan
        stream = self._stream(self._reconsider)
        yield from stream.run(requests)
        seconds = perf_counter() - self._began
        rows = max(1, min(self._plan.rows, stream.finished))
        run = ModeRun(rows, stream.prompt_tokens, stream.output_tokens, seconds)
        if self._modes and run.output_tokens:
            self._modes["output_tokens_per_s"] = round(run.speed, 1)
        if self._plan is first and not stream.restarted and run.output_tokens >= LEAST_TOKENS:
            remember_run(_mode_of(self._plan.method, self._config.speculation.draft_model), run, self._plan.settings())
        if stream.restarted:
            self._judgement.append(f"{stream.restarted}; it was restarted, and answered the remaining records")
        if stream.masked_logprobs:
            self._judgement.append(
                "logprobs of structured answers are those under their grammar (-9999: not allowed there), not the "
                "model's own: vLLM reports them after masking"
            )
        if stream.kept_prefixes:
            self._judgement.append(
                "vLLM could not clear its prefix cache, so prompts of an earlier run were not recomputed"
            )
        report, self._drafting = None, {}
        if self._running is not None:
            with suppress(EngineDied):  # everything is answered
                report = self._running.ask("report")
                self.peak_elsewhere = self._running.peak_memory()
        if report is not None:
            self._drafting = report["about"]
            self._judgement += report["notes"]

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the engine and on the latest run's drafts."""
        return self._notes + self._judgement

    def _stream(self, reconsider: Callable[[int], Plan | None]) -> Stream:
        assert self._running is not None
        return Stream(self._running, self.tokenizer, self._plan, reconsider)

    def _reconsider(self, finished: int) -> Plan | None:
        """Return plain vLLM's plan if that is expected to finish sooner, restart included. finished: outcomes."""
        if self._plain is None or self._running is None or not finished:
            return None
        progress = self._running.ask("progress")
        spent_s = perf_counter() - self._began
        left = self._expected_records - finished if self._expected_records is not None else finished
        if progress["steps"] < LEAST_STEPS or not worth_restarting(
            progress["ratio"], progress["host_share"], spent_s * left / finished, self._load_s
        ):
            return None
        plan, self._plain, self._mode = self._plain, None, PLAIN
        self._plan, self.method = plan, AUTO
        self._modes["restarted"] = {"mode": PLAIN, "after_records": finished, **progress}
        self._judgement.append(
            f"method auto: restarted as plain vLLM after {finished} records; steps with drafts were "
            f"{progress['ratio']:.2f}x as fast as plain ones, and the host takes {progress['host_share']:.0%} of a step"
        )
        return plan

    def outlook(self) -> str:
        """Return what will answer; call check() first."""
        place = "its CPU build" if self._plan.on_cpu else "on a GPU"
        return f"vLLM ({place}) will answer, with method {self.method} and up to {self._plan.rows} records at once"

    def watched(self, bytes_per_s: float, flops_per_s: float) -> None:
        """Return None: vLLM's steps cannot be profiled from here."""

    def about(self) -> dict[str, Any]:
        """Return the model, revision, batch size and the arguments passed to vLLM."""
        plan = self._plan
        return {
            "model": plan.source.path,
            "revision": getattr(plan.hf_config, "_commit_hash", None),
            "batch_size": plan.rows,
            "own_process": plan.own_process,
            "dtype": plan.dtype,
            "quantized": plan.quantized,
            **({"not_done": plan.not_done} if plan.not_done else {}),
            "context_length": plan.context_length or context_length(plan.hf_config),
            "engine_args": {key: value for key, value in plan.engine_args.items() if key != "model"},
            **self._drafting,
            **({"modes": self._modes} if self._modes else {}),
        }


def _mode_of(method: str, draft: str | None) -> str:
    """Return the name under which runs of a method are remembered, of a draft's with the draft."""
    if is_ours(method):
        return OURS
    row = find(method)
    return f"{method} {draft}" if draft and row is not None and row.takes_draft else method


def _method(mode: str) -> str:
    return mode.partition(" ")[0]


def at_once(given: InputConfig | None, rows: int) -> int:
    """Return how many records are computed at once: at most `rows`, and no more than the input is known to have."""
    count = known_rows(given)
    return rows if count is None else max(1, min(rows, count))
