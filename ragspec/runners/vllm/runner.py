"""vLLM, driven step by step: records stream in, answers stream out, one bad record stops nothing.

    runner: vllm
    runner_args: {max_model_len: 4096, gpu_memory_utilization: 0.9}     # any argument of LLM(...)

The records in flight are in vllm/stream.py. Limit: one engine in one process; several GPUs by tensor_parallel_size.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any, Self

from ragspec.config.run import RunConfig, to_sampling
from ragspec.config.secret import revealed
from ragspec.errors import ConfigError, ModelError, did_you_mean
from ragspec.host.machine import free_bytes, free_gpu_bytes
from ragspec.models.resolve import context_length, read_model_config, resolve
from ragspec.records import Failure, Generation, Request, Sampling
from ragspec.runners.vllm.args import Args
from ragspec.runners.vllm.config import (
    DRAFT_TRUST_KEYS,
    TRIED,
    check_build,
    check_draft_code,
    check_memory,
    check_parallel,
    is_ours,
    proposer_settings,
    speculative_config,
)
from ragspec.runners.vllm.environment import device_count, one_line, prepare
from ragspec.runners.vllm.guarded import Guarded
from ragspec.runners.vllm.requests import settings_of
from ragspec.runners.vllm.seeds import mend_seeds
from ragspec.runners.vllm.stream import Stream
from ragspec.runners.vllm.undrafted import Undrafted, can_be_undrafted, lost
from ragspec.speculation.methods import PLAIN, VLLM, method_named

CPU_KV_CACHE_BYTES = 2 << 30  # vLLM would take nearly all memory, and a benchmark loads several engines
CPU_BLOCK = 32  # tokens; vLLM's own 128 leave out more of every shared prefix, and smaller ones its fast kernels

__all__ = ["Args", "Runner"]


class Runner:
    """Answers with one vLLM engine."""

    def __init__(self, config: RunConfig) -> None:
        args = config.args()
        assert isinstance(args, Args)
        assert config.model is not None
        self._args = args
        self._model_name = config.model
        self._spec = config.speculation
        self._structured = config.structured is not None
        self._engine: Any = None
        self._default_sampling = to_sampling(config.sampling)
        raw = config.speculation.speculative_config or {}
        self.method = str(raw.get("method", "draft_model")) if raw else config.speculation.method
        self.remembers = not raw and VLLM in method_named(self.method).remembers
        self.cites = is_ours(self.method)
        self._proposer: Any = None  # our drafter inside the engine, if it can be reached
        self._drafting: dict[str, Any] = {}  # what it says about itself
        self._undrafted: Undrafted | None = None  # how records are answered without drafts, if they can be
        self._guarded: Guarded | None = None  # what judges vLLM's own drafts, if they are to be judged
        self.notes: list[str] = []
        self.prefill_s: float | None = None  # prefill and decoding share the engine's steps
        self.decode_s: float | None = None
        self.decode_tokens = 0

    # -- before any weights ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Find model, draft and tokenizers, and let vLLM judge its configuration. Raises ConfigError."""
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                'runner: vllm is not installed; pip install "ragspec[vllm]" on a machine with a GPU, '
                "`make setup-vllm` (the CPU build) on one without"
            )
        prepare()
        from ragspec.models.generation import asked_beyond_sampling
        from ragspec.models.tokenizer import HFTokenizer, load_tokenizer
        from ragspec.structured.grammars import Grammars

        extra = dict(self._args.model_extra or {})
        trust, revision = bool(extra.get("trust_remote_code")), revealed(extra.get("revision"))
        self._source = resolve(self._model_name, revision)
        self._hf_config = read_model_config(self._source, trust_remote_code=trust)
        self.tokenizer = HFTokenizer(load_tokenizer(self._source, trust_remote_code=trust))
        if self._structured:
            Grammars(self.tokenizer.inner, len(self.tokenizer.inner), ())
        self._not_done = ", ".join(asked_beyond_sampling(self._source.path, revision))
        if self._not_done:
            self.notes.append(f"the model's generation_config asks for {self._not_done}, which vLLM does not do")
        draft_path, other_vocabulary = self._check_draft(trust)
        spec = speculative_config(self._spec, draft_path)
        check_draft_code(spec, self._source.path, trust, self._spec.draft_trust_remote_code)
        if spec is not None and other_vocabulary:
            spec["use_heterogeneous_vocab"] = True
        # vLLM's modules read the environment as they are imported
        with redirect_stdout(sys.stderr):
            from vllm.platforms import current_platform

            spec = self._settle(spec)
            self._on_cpu = current_platform.is_cpu()
            check_build(spec, self._on_cpu)
            devices = None if self._on_cpu else device_count()
            self.notes += check_parallel(extra, spec, devices)
            check_memory(self._model_name, self._source.path, free_bytes() if self._on_cpu else free_gpu_bytes())
            self._engine_args = self._make_engine_args(extra, spec)
            self.context_length: int | None = self._configure()
            self._check_sampling()

    def _is_tried(self) -> bool:
        """Return whether what is inside this vLLM is known."""
        import vllm

        return ".".join(vllm.__version__.split(".")[:2]) in TRIED

    def _settle(self, spec: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return what drafts: prompt lookup in place of our own drafter on a vLLM that it was not tested with."""
        import vllm

        if not is_ours(self.method):
            return spec
        if self._is_tried():
            if self._spec.draft_model:
                self.notes.append("speculation.draft_model: has no effect; vLLM cannot switch to it during a run")
            return spec
        self.notes.append(
            f"method {self.method} has only been tried with vLLM {', '.join(TRIED)}, and this is {vllm.__version__}; "
            "prompt_lookup is used instead"
        )
        self.method, self.cites = "prompt_lookup", False
        self._spec = self._spec.model_copy(update={"method": self.method, "draft_model": None})
        return speculative_config(self._spec)

    def _check_draft(self, trust: bool) -> tuple[str | None, bool]:
        """Return where the draft model is and whether its tokens differ from the target's."""
        name = self._spec.draft_model
        if name is None or self.method == PLAIN or is_ours(self.method):
            return None, False
        source = resolve(name, key="speculation.draft_model")
        if self.method != "draft_model":
            return source.path, False  # heads: they have the target's vocabulary
        from ragspec.models.draft import find_draft, width_of

        width = width_of(self._hf_config)
        draft = find_draft(
            name,
            self._spec.draft_tokenizer,
            (self._model_name, self.tokenizer.inner, width),
            trust_remote_code=trust and self._spec.draft_trust_remote_code,
            remedy="to draft in the tokens that both have",
            trust_key=DRAFT_TRUST_KEYS,
        )
        # vLLM compares sizes only: paddings that differ need its mapping too, which is then the identity
        return draft.source.path, draft.other_tokens or draft.width != width

    def _lost(self, settings: Mapping[str, Any]) -> str:
        return "" if self.method == PLAIN else lost(settings, self._on_cpu)

    def _check_sampling(self) -> None:
        """Say what the config's own settings cost: records without drafts, or, where there can be none, the run."""
        wrong = self._lost(settings_of(self._default_sampling, revealed(self._args.sampling_args)))
        if wrong and not self._undraftable:
            raise ConfigError(f"sampling.{wrong}; use method: none, or remove it")
        if wrong:
            self.notes.append(f"sampling.{wrong}: such records are answered without drafts")

    def _make_engine_args(self, extra: dict[str, Any], spec: dict[str, Any] | None) -> dict[str, Any]:
        args: dict[str, Any] = {"model": self._source.path, "disable_log_stats": False, "use_tqdm_on_load": False}
        args["structured_outputs_config"] = {"backend": "guidance"}  # llguidance, as in our own engine
        if self._on_cpu:
            args["dtype"] = "float32"  # bfloat16 is emulated on CPUs without AVX-512
            if "kv_cache_memory_bytes" not in extra and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
                args["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
            if self._args.lookahead > 1:
                args["block_size"] = CPU_BLOCK
        if self._args.batch_size != "auto":
            args["max_num_seqs"] = self._args.batch_size
        if spec is not None:
            args |= {"speculative_config": spec, "per_request_spec_decode_metrics": "detailed"}
        if is_ours(self.method):
            extra = extra | {"additional_config": (extra.get("additional_config") or {}) | self._settings()}
        return args | extra

    def _settings(self) -> dict[str, Any]:
        from ragspec.models.draft import width_of

        return {"ragspec": proposer_settings(self._spec, width_of(self._hf_config))}

    def _configure(self) -> int:
        """Let vLLM check all its arguments, no weights read; return the model length that applies."""
        from dataclasses import fields

        from vllm.engine.arg_utils import EngineArgs

        known = [field.name for field in fields(EngineArgs)]
        for key in self._engine_args:
            if key not in known:
                raise ConfigError(f'"runner_args.{key}" is not an argument of vLLM{did_you_mean(key, known)}')
        try:
            config = EngineArgs(**revealed(self._engine_args)).create_engine_config()
        except Exception as error:  # vLLM raises whatever its many checks raise; none of them has read weights
            raise ConfigError(f"vLLM refuses the configuration: {one_line(error)}") from error
        self._undraftable = self._is_tried() and can_be_undrafted(config)
        self._rows = int(config.scheduler_config.max_num_seqs)
        self._dtype = str(config.model_config.dtype).removeprefix("torch.")
        self._quantized = config.model_config.quantization is not None
        return int(config.model_config.max_model_len)

    # -- weights --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with redirect_stdout(sys.stderr):
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            if self._on_cpu and self._is_tried():
                mend_seeds()
            try:
                self._engine = LLMEngine.from_engine_args(EngineArgs(**revealed(self._engine_args)))
            except Exception as error:  # whatever stops an engine from starting
                self._free()
                with_method = "" if self.method == PLAIN else f" with method {self.method}"
                raise ModelError(
                    f'"{self._model_name}": vLLM could not start{with_method}: {one_line(error)} (if memory is short: '
                    "lower runner_args.max_model_len, or choose a smaller model)"
                ) from error
        if is_ours(self.method):
            self._find_proposer()
        if self.method != PLAIN and self._undraftable:
            self._undrafted = Undrafted.within(self._engine, on_cpu=self._on_cpu)
            if self._args.guard and not is_ours(self.method):
                spec = self._spec
                fixed = spec.draft_tokens or spec.num_tokens_by_batch_size or spec.speculative_config
                self._guarded = Guarded.within(self._engine, pauses=not fixed)
        return self

    def _find_proposer(self) -> None:
        """Reach for our drafter in the engine; if it cannot be reached, it still drafts but reports nothing."""
        if hasattr(self._engine, "model_executor"):  # the engine is in this process
            found = self._engine.collective_rpc(lambda worker: getattr(worker.model_runner, "drafter", None))
            self._proposer = found[0] if len(found) == 1 else None
        if self._proposer is None:
            self.cites = False
            self.remembers = True  # it cannot be told that a pass begins
            self.notes.append(f"method {self.method}: vLLM runs in other processes; passages are not cited or shared")

    def __exit__(self, *exc: object) -> None:
        self._free()

    def _free(self) -> None:
        engine, self._engine, self._proposer, self._undrafted, self._guarded = self._engine, None, None, None, None
        if engine is not None:
            engine.engine_core.shutdown()
            del engine
        gc.collect()
        from vllm.distributed import cleanup_dist_env_and_memory

        with redirect_stdout(sys.stderr):
            cleanup_dist_env_and_memory()

    def warm_up(self, records: int | None = None) -> None:
        """Answer a few tokens, so that the first record does not pay for lazy initialisation."""
        ids = self.tokenizer.encode("one two three one two three one two", special_tokens=True)
        for _ in self._answer([Request(-1, "warm-up", ids, Sampling(max_new_tokens=8))]):
            pass

    # -- answering ------------------------------------------------------------------------------------------------

    def generate(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield outcomes as they finish, with a bounded number of requests in flight."""
        if self._guarded is not None:
            self._guarded.reset()
        yield from self._answer(requests)
        if self._guarded is not None:
            self._drafting = self._guarded.about()
            self.notes += filter(None, [self._guarded.note(self.method)])
        if self._proposer is not None:
            self._drafting = self._proposer.about()
            self.notes += self._proposer.notes
            if self.method == "auto":
                self.notes.append(self._proposer.trial.note())

    def _answer(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        args = self._args
        stream = Stream(
            self._engine,
            self._proposer,
            self.tokenizer,
            rows=self._rows,
            lookahead=args.lookahead,
            sampling_args=revealed(args.sampling_args),
            lost=self._lost,
            undrafted=self._undrafted,
            method=self.method,
        )
        return stream.run(requests)

    def outlook(self) -> str:
        """Return what will answer; needs check()."""
        place = "its CPU build" if self._on_cpu else "on a GPU"
        return f"vLLM ({place}) will answer, with method {self.method} and up to {self._rows} records at once"

    def watched(self, bytes_per_s: float, flops_per_s: float) -> None:
        """vLLM's steps are its own."""

    def about(self) -> dict[str, Any]:
        """Return what ran: model, revision, batch size, the arguments that vLLM got."""
        return {
            "model": self._source.path,
            "revision": getattr(self._hf_config, "_commit_hash", None),
            "batch_size": self._rows,
            "dtype": self._dtype,
            "quantized": self._quantized,
            **({"not_done": self._not_done} if self._not_done else {}),
            "context_length": self.context_length or context_length(self._hf_config),
            "engine_args": {key: value for key, value in self._engine_args.items() if key != "model"},
            **self._drafting,
        }
