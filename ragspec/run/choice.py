"""Which runner answers where the config leaves it open (`runner: auto`): the one that should be done first.

Loading counts: vLLM needs a minute or more, our own engine seconds. What this machine has shown with the model in
earlier runs (experience.py) decides, and priors until then.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from ragspec import runners
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError, flat
from ragspec.host.machine import has_gpu
from ragspec.inputs.base import within
from ragspec.inputs.files import size_of
from ragspec.inputs.opening import open_source
from ragspec.run.experience import Speed, speeds
from ragspec.speculation.methods import AUTO, HF, VLLM

LOADING_S = {HF: 5.0, VLLM: 80.0}
TOKEN_S = {"CPU": {HF: 2e-3, VLLM: 2e-3}, "GPU": {HF: 1e-4, VLLM: 3e-5}}  # of prompts and answers together
PRIOR_TOKENS = 1000  # that those count for, beside the tokens of earlier runs
TOKEN_BYTES = 4  # of an input, roughly


@dataclass(frozen=True, slots=True)
class Choice:
    """config: with a runner named. why: one line for the user, "" where there was nothing to choose."""

    config: RunConfig
    why: str = ""


def settle(config: RunConfig, limit: int | None = None) -> Choice:
    """Return choose() for the first `limit` records of the config's input. A pipe is not opened."""
    if config.runner != AUTO or config.input is None or size_of(config.input) is None:
        return choose(config, None)
    try:
        with open_source(config.input) as source:
            return choose(config, source.count(), limit=limit)
    except ConfigError:  # whoever opens it next says so
        return choose(config, None)


def choose(config: RunConfig, rows: int | None, began: str | None = None, *, limit: int | None = None) -> Choice:
    """Return the config with a runner named. rows: of the input, None if nobody knows; the first `limit` are answered.

    began: the runner that began the output.
    """
    if config.runner != AUTO:
        return Choice(config)
    able = config.runners()
    if began in able:
        return _chosen(config, str(began), "it began the output")
    if able == [VLLM]:
        return _chosen(config, VLLM, "only that has what the config asks for")
    if VLLM not in able:
        return _chosen(config, HF, "only that has what the config asks for")
    if not has_vllm():
        return _chosen(config, HF, "vLLM is not installed")
    if rows is None:
        return _chosen(config, HF, "the number of records is not known, and vLLM takes long to load")
    tokens = _tokens(config, rows, limit)
    device = "GPU" if has_gpu() else "CPU"
    known = speeds(config)
    seconds = expected(known, device, tokens)
    basis = (
        f"by earlier runs of {' and '.join(sorted(known))}" if known else "by what is usual: neither has run here yet"
    )
    gain = seconds[HF] - seconds[VLLM]
    if gain <= 0:
        return _chosen(config, HF, f"expected to be done some {-gain:,.0f} s before vLLM, {basis}")
    try:
        runners.module(VLLM).Runner(config.model_copy(update={"runner": VLLM})).check()
    except ConfigError as error:
        return _chosen(config, HF, f"vLLM is expected to be faster, but {error}")
    except Exception as error:  # a vLLM that is broken raises what it likes as it is imported
        return _chosen(
            config, HF, f"vLLM is expected to be faster, but fails here ({type(error).__name__}: {flat(error, 120)})"
        )
    return _chosen(config, VLLM, f"expected to be done some {gain:,.0f} s before huggingface, {basis}")


def expected(known: Mapping[str, Speed], device: str, tokens: int) -> dict[str, float]:
    """Return the seconds that each runner should take for `tokens` tokens of prompts and answers, loading included.

    known: what runs here have shown. A runner that has not run is taken to be as much faster or slower than the other
    as the priors say.
    """
    prior = TOKEN_S[device]
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


def _chosen(config: RunConfig, word: str, why: str) -> Choice:
    return Choice(config.model_copy(update={"runner": word}), f"runner: {word}, as chosen by auto: {why}")


def _tokens(config: RunConfig, rows: int, limit: int | None) -> int:
    """Return roughly how many tokens the prompts and answers of the first `limit` of `rows` rows have."""
    records = within(limit, rows) or 0
    row_bytes = (size_of(config.input) or 0) / max(1, rows)
    return int(records * (row_bytes / TOKEN_BYTES + config.sampling.expected_tokens))
