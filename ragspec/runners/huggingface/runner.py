"""Hugging Face models: ragspec's batched engine where possible, stock `generate()` for what only that can do.

    runner: huggingface
    runner_args: {batch_size: 8, dtype: bfloat16, device: cuda}

The stats file says which one answered (`engine`), and the notes say why. `engine: transformers` forces generate();
`engine: ragspec` makes the fallback an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ragspec.config.redaction import revealed
from ragspec.config.run import RunConfig, to_sampling
from ragspec.errors import ConfigError, ModelError, flat
from ragspec.host.quiet import quiet
from ragspec.records import Failure, Generation, Request
from ragspec.runners.base import Watched
from ragspec.runners.huggingface.args import Args, check_args, only_stock
from ragspec.runners.huggingface.checkpoint import find, load_draft, translation
from ragspec.speculation.methods import HF, PLAIN, method_named

if TYPE_CHECKING:
    from ragspec.engine.backend import EngineBackend
    from ragspec.engine.kv.prefix_store import PrefixStore
    from ragspec.models.draft import Draft
    from ragspec.runners.huggingface.checkpoint import Checkpoint
    from ragspec.runners.huggingface.stock import StockBackend

PLAIN_BATCH_SIZE = 8

__all__ = ["Args", "Runner"]


class Runner:
    """Loads the model and answers with one of the two backends."""

    def __init__(self, config: RunConfig) -> None:
        args = config.args()
        assert isinstance(args, Args)
        assert config.model is not None
        self._args = args
        self._model_name = config.model
        self._spec = config.speculation
        self._greedy_by_default = config.sampling.temperature == 0
        self._backend: EngineBackend | StockBackend | None = None
        self._draft: Draft | None = None
        self._loaded: dict[str, Any] = {}
        self._final_clock: tuple[float | None, float | None, int] = (0.0, 0.0, 0)
        self.method = config.speculation.method
        self.remembers = False
        self._sampling = to_sampling(config.sampling)
        self._structured = config.structured is not None
        self._expected_tokens = config.sampling.expected_tokens
        self._method = method_named(config.speculation.method)
        self.cites = self._method.cites_on(HF)
        self.notes: list[str] = []

    # -- check -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Find the model, draft and tokenizers. Raises ConfigError for settings that cannot work."""
        quiet()
        self.notes += check_args(self._args, self._spec)
        from ragspec.runners.huggingface.checkpoint import Checkpoint

        self.use_checkpoint(Checkpoint(self._model_name, self._args))
        self.notes += self._checkpoint.check_weights()
        self.notes += self._checkpoint.caveats(self._sampling.stop_token_ids)
        if self._method.takes_draft and self._spec.draft_model:
            self._draft = find(self._spec, self._model_name, self._checkpoint, self.notes)
        if self.method == "early_exit":
            layers = self._checkpoint.config.get_text_config().num_hidden_layers
            if (self._spec.early_exit_layer or 0) >= layers:
                raise ConfigError(
                    f"speculation.early_exit_layer: {self._spec.early_exit_layer} must be less than the model's "
                    f"{layers} layers"
                )
        if self._structured:
            self._checkpoint.grammars()
        why = self._stock_reason()
        if why and self._needs_engine():
            raise ConfigError(f"{why}: only stock generate() does that{self._conflict()}")

    def use_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Answer with this checkpoint, which `check` chooses by the config."""
        self._checkpoint = checkpoint
        self.tokenizer = checkpoint.tokenizer
        self.context_length = checkpoint.context_length

    def outlook(self) -> str:
        """Return which engine will answer, as far as the config tells; call check() first."""
        why = self._stock_reason()
        if why:
            return f"stock generate() will answer: {why}"
        return (
            f"ragspec's batched engine will answer, with method {self.method}; a check after loading confirms that "
            "the model fits it"
        )

    def _needs_engine(self) -> bool:
        return self._args.engine == "ragspec" or not self._method.stock

    def _conflict(self) -> str:
        if self._method.stock:
            return "; remove it, or set runner_args.engine: auto"
        return f", and it does not have method {self.method}"

    def _stock_reason(self) -> str:
        return only_stock(self._args, self._spec)

    # -- load --------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        draft = self._draft
        model, draft_model = self._checkpoint.load(), load_draft(draft, self._spec, self._args) if draft else None
        self._loaded = {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
        rules = self._checkpoint.rules
        if own := rules.overridden(self._sampling):
            self.notes.append(
                f"the model's generation_config asks for {own}, but your config's sampling section "
                "overrides it; to use it, set it there"
            )
        why = self._stock_reason()
        key = rules.only_stock()
        if key == "token_healing":
            raise ModelError(
                "the model's generation_config.token_healing: it rewrites prompts, which ragspec does not; set "
                "runner_args.generate_args: {token_healing: false}"
            )
        if not why and key:
            why = f"the model's generation_config.{key}"
        if not why:
            why = self._start_engine(model, draft_model)
        if why:
            self._start_stock(model, draft_model, why)
        return self

    def _start_engine(self, model: Any, draft_model: Any) -> str:
        """Set up the engine; return why it cannot serve the model, or ""."""
        from ragspec.engine.backend import EngineBackend, Speculation
        from ragspec.engine.model.loaded import Refused

        spec, draft, asked = self._spec, self._draft, self._args.batch_size
        prefixes, loaded_as = self._prefixes()
        try:
            self._backend = EngineBackend(
                model,
                self.tokenizer,
                self._checkpoint.ends,
                Speculation(
                    self.method,
                    spec.draft_tokens,
                    spec.drafting,
                    draft_model,
                    draft.context_length if draft else None,
                    translation(draft, draft_model, self._checkpoint) if draft else None,
                    spec.early_exit_layer if self.method == "early_exit" else None,
                ),
                rows=None if asked == "auto" else asked,
                lookahead=self._args.lookahead,
                rules=self._checkpoint.rules,
                compile=self._args.compile,
                attention=self._args.attention,
                graphs=self._args.graphs,
                exact=self._args.exact,
                grammars=self._checkpoint.grammars,
                prefixes=prefixes,
                loaded_as=loaded_as,
            )
        except Refused as reason:
            if self._needs_engine():
                raise ModelError(
                    f'"{self._model_name}": {reason}; set speculation.method to one that stock generate() has '
                    "(such as prompt_lookup), and runner_args.engine: auto"
                ) from reason
            return f'"{self._model_name}": {reason}'
        return ""

    def _prefixes(self) -> tuple[PrefixStore | None, str]:
        """Return the store of prefixes, if one is asked for, and what tells the model from others of its name."""
        from ragspec.engine.kv.prefix_store import PrefixStore
        from ragspec.models.resolve import weights_state

        args = self._args
        if args.prefix_store is None:
            return None, ""
        store = PrefixStore(Path(args.prefix_store).expanduser(), int(args.prefix_store_gb * 10**9))
        return store, repr((weights_state(self._checkpoint.source), revealed(args.model_args)))

    def _start_stock(self, model: Any, draft_model: Any, why: str) -> None:
        from ragspec.runners.huggingface.assisted import Speculation
        from ragspec.runners.huggingface.stock import StockBackend

        spec, asked = self._spec, self._args.batch_size
        on_trial = self.method == "auto"
        if on_trial:
            self.method = "draft_model" if self._draft else "prompt_lookup"
            self.notes.append(f"method auto: {self.method}, unless plain decoding answers the first records faster")
        rows = 1
        if self.method == PLAIN:
            rows = PLAIN_BATCH_SIZE if asked == "auto" else asked
        elif asked not in ("auto", 1):
            self.notes.append(
                f"runner_args.batch_size: {asked} has no effect: stock generate() speculates on one record at a time"
            )
        if spec.ngram_min is not None:
            self.notes.append("speculation.ngram_min: has no effect in stock generate()")
        self.notes.append(f"stock generate() answers, not ragspec's engine: {why}")
        if self._args.prefix_store is not None:
            self.notes.append("runner_args.prefix_store: has no effect in stock generate()")
        self._backend = StockBackend(
            model,
            self.tokenizer,
            self._checkpoint.ends,
            Speculation(
                method=self.method,
                num_tokens=spec.draft_tokens,
                ngram_max=spec.ngram_max,
                early_exit_layer=spec.early_exit_layer,
                schedule=spec.schedule,
                confidence_threshold=spec.confidence_threshold,
                knobs=revealed(spec.extra),
                draft=self._draft,
                draft_model=draft_model,
                on_trial=on_trial,
            ),
            rows=rows,
            rules=self._checkpoint.rules,
            greedy_by_default=self._greedy_by_default,
            grammars=self._checkpoint.grammars,
        )

    def __exit__(self, *exc: object) -> None:
        if self._backend is not None:
            self._loaded |= self._backend.about()
            self._final_clock = (self.prefill_s, self.decode_s, self.decode_tokens)
            self._checkpoint.forget()
        self._backend = None
        from ragspec.models.memory import DEVICE_FAILED, free_memory

        with suppress(*DEVICE_FAILED):
            free_memory()

    def warm_up(self, records: int | None = None) -> None:
        """Run once what the first record would otherwise pay for."""
        assert self._backend is not None
        self._backend.warm_up(records, self._expected_tokens)

    # -- generate ----------------------------------------------------------------------------------

    def generate(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield outcomes as they finish. Raises ModelError if the device fails."""
        from ragspec.models.memory import DEVICE_FAILED

        assert self._backend is not None
        try:
            yield from self._backend.generate(requests)
        except DEVICE_FAILED as error:
            raise ModelError(
                f"the device has failed: {flat(error, 200)}; finished answers are kept, run again to continue (if it "
                "fails again, see what the driver's log says)"
            ) from error
        finally:
            if self._backend is not None:
                self.notes += [note for note in self._backend.notes if note not in self.notes]

    @property
    def peak_elsewhere(self) -> tuple[int, int]:
        return 0, 0

    @property
    def prefill_s(self) -> float | None:
        """Seconds to first tokens, summed over batches."""
        return self._backend.clock.prefill_s if self._backend else self._final_clock[0]

    @property
    def decode_s(self) -> float | None:
        """Seconds after the first tokens."""
        return self._backend.clock.decode_s if self._backend else self._final_clock[1]

    @property
    def decode_tokens(self) -> int:
        """Tokens generated in decode_s."""
        return self._backend.clock.decode_tokens if self._backend else self._final_clock[2]

    def watched(self, bytes_per_s: float, flops_per_s: float) -> Watched | None:
        """Return a profiler of the engine's steps; stock generate() has none."""
        return self._backend.watched(bytes_per_s, flops_per_s) if self._backend is not None else None

    def about(self) -> dict[str, Any]:
        """Return the model, revision, dtype, device, engine, batch size and draft."""
        about: dict[str, Any] = {
            "model": self._checkpoint.source.path,
            "revision": getattr(self._checkpoint.config, "_commit_hash", None),
            "context_length": self.context_length,
        }
        about |= self._loaded
        if self._backend is not None:
            about |= self._backend.about()
        if self._draft:
            about["draft_model"] = self._draft.source.path
            about["draft_vocabulary"] = "other" if self._draft.other_tokens else "same"
        return about
