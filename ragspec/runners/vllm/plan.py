"""Resolve the vLLM engine of a config before any weights load: model, speculation method and engine arguments."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from ragspec.config.redaction import revealed
from ragspec.config.run import RunConfig, to_sampling
from ragspec.errors import ConfigError, did_you_mean
from ragspec.host.machine import free_bytes, free_gpu_bytes, machine
from ragspec.models.resolve import read_model_config, resolve
from ragspec.models.stopping import token_set
from ragspec.runners.vllm.args import Args
from ragspec.runners.vllm.config import (
    DRAFT_TRUST_KEYS,
    EXTENSION,
    TRIED,
    Additions,
    check_build,
    check_draft_code,
    check_memory,
    check_parallel,
    device_count,
    is_ours,
    one_line,
    prepare,
    proposer_settings,
    speculative_config,
)
from ragspec.runners.vllm.graphs import allows_ragged_graphs
from ragspec.runners.vllm.patches.undrafted import is_reachable, lost
from ragspec.runners.vllm.stream import settings_of
from ragspec.speculation.methods import PLAIN, registered

CPU_KV_CACHE_BYTES = 2 << 30  # vLLM would reserve nearly all memory, and a benchmark loads several engines
CPU_BLOCK = 32  # tokens; vLLM's 128 cache less of each shared prefix, smaller blocks lose its fast kernels

SMALLER = {"quantization", "cpu_offload_gb", "offload_backend"}  # by these, weights take less of a GPU than their files
NO_STORE = (
    "runner_args.prefix_store: only works with runner huggingface; for vLLM, pass its "
    "kv_offloading_size (GiB of memory) or kv_transfer_config in runner_args"
)


class Plan:
    """The engine that a config asks for. All attributes but `method` and `notes` are set by check()."""

    def __init__(self, config: RunConfig) -> None:
        args = config.args()
        assert isinstance(args, Args)
        assert config.model is not None
        self.args = args
        self.model_name = config.model
        self.spec = config.speculation
        self._structured = config.structured is not None
        self._default_sampling = to_sampling(config.sampling)
        raw = self.spec.speculative_config or {}
        self.method = str(raw.get("method", "draft_model")) if raw else self.spec.method
        self.notes: list[str] = []

    def check(self) -> None:
        """Find the model, draft and tokenizers, and let vLLM validate its configuration. Raises ConfigError."""
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                'runner: vllm is not installed; pip install "ragspec[vllm]" on a machine with a GPU, '
                "`make setup-vllm` (the CPU build) on one without"
            )
        if "prefix_store" in (self.args.model_extra or {}):
            raise ConfigError(NO_STORE)
        prepare()
        from ragspec.models.checks import check_weights, model_notes
        from ragspec.models.draft import width_of
        from ragspec.models.logits_processors import asked_beyond_sampling
        from ragspec.models.tokenizer import HFTokenizer, load_tokenizer
        from ragspec.structured.grammars import Grammars

        extra = dict(self.args.model_extra or {})
        trust, revision = bool(extra.get("trust_remote_code")), revealed(extra.get("revision"))
        self.source = resolve(self.model_name, revision)
        self.hf_config = read_model_config(self.source, trust_remote_code=trust)
        if extra.get("load_format", "auto") in ("auto", "safetensors"):
            self.notes += check_weights(self.source, self.hf_config, trust_remote_code=trust, by_transformers=False)
        tokenizer = load_tokenizer(self.source, trust_remote_code=trust)
        self.tokenizer = HFTokenizer(tokenizer, width=width_of(self.hf_config))
        stops = (*self._default_sampling.stop_token_ids, tokenizer.eos_token_id)  # vLLM also stops at the tokenizer's
        self.notes += model_notes(self.source, self.hf_config, self.tokenizer, stops=stops)
        if self._structured:
            Grammars(self.tokenizer.inner, len(self.tokenizer.inner), ())
        self.not_done = ", ".join(asked_beyond_sampling(self.source.path, revision))
        if self.not_done:
            self.notes.append(f"the model's generation_config asks for {self.not_done}, which vLLM does not support")
        draft_path, other_vocabulary = self._check_draft(trust)
        spec = speculative_config(self.spec, draft_path)
        check_draft_code(spec, self.source.path, trust, self.spec.draft_trust_remote_code)
        if spec is not None and other_vocabulary:
            spec["use_heterogeneous_vocab"] = True
        # vLLM's modules read the environment at import
        with redirect_stdout(sys.stderr):
            from vllm import __version__ as vllm_version
            from vllm.platforms import current_platform

            spec = self._resolve_method(spec)
            self.on_cpu = current_platform.is_cpu()
            check_build(spec, self.on_cpu, vllm_version)
            devices = None if self.on_cpu else device_count()
            self.notes += check_parallel(extra, spec, devices)
            if not SMALLER & extra.keys():
                check_memory(self.model_name, self.source.path, free_bytes() if self.on_cpu else free_gpu_bytes())
            self.engine_args = self._make_engine_args(extra, spec)
            self.context_length: int | None = self._configure()
            self._check_sampling()

    def is_tried(self) -> bool:
        """Return whether our patches were tested with this vLLM version."""
        import vllm

        return ".".join(vllm.__version__.split(".")[:2]) in TRIED

    def _resolve_method(self, spec: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the speculative config; fall back to prompt lookup if our proposer is untested with this vLLM."""
        import vllm

        if not is_ours(self.method):
            return spec
        if self.is_tried():
            if self.spec.draft_model:
                self.notes.append("speculation.draft_model: has no effect; vLLM cannot switch to it during a run")
            return spec
        self.notes.append(
            f"method {self.method} is only tested with vLLM {', '.join(TRIED)}, and this is {vllm.__version__}; "
            "prompt_lookup is used instead"
        )
        self.method = "prompt_lookup"
        self.spec = self.spec.model_copy(update={"method": self.method, "draft_model": None})
        return speculative_config(self.spec)

    def _check_draft(self, trust: bool) -> tuple[str | None, bool]:
        """Return the draft model's path and whether its tokens differ from the target's."""
        name = self.spec.draft_model
        if name is None or self.method == PLAIN or is_ours(self.method):
            return None, False
        source = resolve(name, key="speculation.draft_model")
        if self.method != "draft_model":
            return source.path, False  # draft heads share the target's vocabulary
        from ragspec.models.checks import check_weights
        from ragspec.models.draft import DRAFT_KEY, find_draft, width_of

        width = width_of(self.hf_config)
        draft = find_draft(
            name,
            self.spec.draft_tokenizer,
            (self.model_name, self.tokenizer.inner, width),
            trust_remote_code=trust and self.spec.draft_trust_remote_code,
            remedy="to draft in the tokens that both have",
            trust_key=DRAFT_TRUST_KEYS,
        )
        check_weights(draft.source, draft.config, key=DRAFT_KEY, by_transformers=False)
        # vLLM compares sizes only: with different paddings it needs its vocabulary mapping too, which is an identity
        return draft.source.path, draft.other_tokens or draft.width != width

    def lost(self, settings: Mapping[str, Any]) -> str:
        """Return which of these settings vLLM gets wrong while it speculates, or ""."""
        return "" if self.method == PLAIN else lost(settings, self.on_cpu)

    def _check_sampling(self) -> None:
        """Note that records with the config's own sampling get no drafts; raise ConfigError if that is impossible."""
        wrong = self.lost(settings_of(self._default_sampling, revealed(self.args.sampling_args)))
        if wrong and not self.undraftable:
            raise ConfigError(f"sampling.{wrong}; use method: none, or remove it")
        if wrong:
            self.notes.append(f"sampling.{wrong}: such records are answered without drafts")

    def _make_engine_args(self, extra: dict[str, Any], spec: dict[str, Any] | None) -> dict[str, Any]:
        args: dict[str, Any] = {"model": self.source.path, "disable_log_stats": True, "use_tqdm_on_load": False}
        args["structured_outputs_config"] = {"backend": "guidance"}  # llguidance, as in ragspec's engine
        if self.on_cpu:
            args["dtype"] = "float32"  # bfloat16 is emulated on CPUs without AVX-512
            if "kv_cache_memory_bytes" not in extra and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
                args["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
            if self.args.lookahead > 1:
                args["block_size"] = CPU_BLOCK
        if self.args.batch_size != "auto":
            args["max_num_seqs"] = self.args.batch_size
        if spec is not None:
            args |= {"speculative_config": spec, "per_request_spec_decode_metrics": "detailed"}
        if is_ours(self.method):
            extra = extra | {"additional_config": (extra.get("additional_config") or {}) | self._settings()}
            args["worker_extension_cls"] = EXTENSION
        return args | extra

    def _created(self) -> Any:
        """Return vLLM's configuration. Raises ConfigError."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext

        try:
            return EngineArgs(**revealed(self.engine_args)).create_engine_config(UsageContext.LLM_CLASS)
        except Exception as error:  # its many checks raise many types; none of them has read weights
            raise ConfigError(f"vLLM rejects the configuration: {one_line(error)}") from error

    def _compilation(self) -> dict[str, Any]:
        """Return the user's `compilation_config`, unless it is of another kind."""
        given = self.engine_args.get("compilation_config") or {}
        return dict(given) if isinstance(given, Mapping) else {}

    def settings(self) -> list[object]:
        """Return what a mode's speed depends on, apart from the mode and the rows."""
        import vllm

        about, other = machine(), {"speculative_config", "additional_config", "worker_extension_cls"}
        other |= {"per_request_spec_decode_metrics", "compilation_config", "max_num_seqs", "model"}
        shared = {key: value for key, value in self.engine_args.items() if key not in other}
        where = [about["processor"], about["cores"], about["gpus"]]
        return [self.model_name, vllm.__version__, *where, json.dumps(shared, sort_keys=True, default=str)]

    def _may_choose_graphs(self) -> bool:
        """Return whether drafts of ours differ in length on a GPU, and the user has not chosen graphs for them."""
        given = self.engine_args.get("compilation_config")
        chosen = not (given is None or isinstance(given, Mapping)) or "cudagraph_mode" in self._compilation()
        return is_ours(self.method) and not self.on_cpu and not chosen

    def _wants_own_process(self) -> bool:
        """Return whether an engine of its own process is faster: on a GPU, unless only this process has its drafter."""
        return not self.on_cpu and self.method not in registered

    def _additions(self) -> Additions:
        spec = self.spec
        fixed = spec.draft_tokens or spec.num_tokens_by_batch_size or spec.speculative_config
        timed = self.args.guard and not is_ours(self.method)
        return Additions(self.method, is_ours(self.method), self.on_cpu, pauses=not fixed if timed else None)

    def _settings(self) -> dict[str, Any]:
        from ragspec.models.draft import width_of

        return {"ragspec": proposer_settings(self.spec, width_of(self.hf_config))}

    def _end_tokens(self, model_config: Any) -> frozenset[int]:
        """Return the tokens at which vLLM ends an answer: the tokenizer's and the generation_config's."""
        own = model_config.try_get_generation_config().get("eos_token_id")
        return token_set(own) | token_set(self.tokenizer.inner.eos_token_id)

    def _configure(self) -> int:
        """Let vLLM validate all arguments, without reading weights; return the effective max_model_len."""
        from dataclasses import fields

        from vllm import envs
        from vllm.engine.arg_utils import EngineArgs

        known = [field.name for field in fields(EngineArgs)]
        for key in self.engine_args:
            if key not in known:
                raise ConfigError(f'"runner_args.{key}" is not an argument of vLLM{did_you_mean(key, known)}')
        config = self._created()
        if self._may_choose_graphs() and allows_ragged_graphs(config):
            self.engine_args["compilation_config"] = self._compilation() | {"cudagraph_mode": "FULL"}
            config = self._created()
        self.tokenizer.ends = self._end_tokens(config.model_config)
        wanted = self._wants_own_process() if self.args.own_process == "auto" else self.args.own_process
        self.own_process = wanted or envs.VLLM_ENABLE_V1_MULTIPROCESSING
        self.undraftable = self.method != PLAIN and self.is_tried() and is_reachable(config)
        self.additions = self._additions() if self.method != PLAIN and self.is_tried() else None
        self.asynchronous = bool(config.scheduler_config.async_scheduling)
        if self.additions is not None and self.additions.pauses is not None and not self.undraftable:
            why = "schedules them asynchronously" if self.asynchronous else "has its devices in other processes"
            self.notes.append(f"guard: drafts of {self.method} are not paused where they are slower, as vLLM {why}")
        self.rows = int(config.scheduler_config.max_num_seqs)
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.quantized = config.model_config.quantization is not None
        return int(config.model_config.max_model_len)
