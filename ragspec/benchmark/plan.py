"""What to run: every method x batch size x draft length that was asked for, the baseline first.

A candidate is an ordinary config, checked like one, so a benchmark cannot start what a run could not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ragspec.config import RunConfig, build_config
from ragspec.errors import ConfigError

BASELINE = "none"
DRAFTED = ("draft_model", "eagle", "eagle3", "medusa", "dflash")  # methods that take a draft model


@dataclass(frozen=True, slots=True)
class Candidate:
    """One thing to time. `name` is unique and names its files."""

    name: str
    config: RunConfig
    batch_size: int | None
    num_tokens: int | None


def make_plan(
    config: RunConfig, methods: Sequence[str], batch_sizes: Sequence[int], num_tokens: Sequence[int]
) -> list[Candidate]:
    """Return the candidates, baselines first. Without `methods`: plain decoding and what the config says."""
    if config.input is None or config.input == "-":
        raise ConfigError("input: a benchmark reads its input several times; give a file with --input")
    wanted = list(dict.fromkeys(methods)) or list(dict.fromkeys([BASELINE, config.speculation.method]))
    wanted.sort(key=lambda method: method != BASELINE)
    candidates = []
    sizes: Sequence[int | None] = list(dict.fromkeys(batch_sizes)) or [None]
    lengths: Sequence[int | None] = list(dict.fromkeys(num_tokens)) or [None]
    for method, batch_size in product(wanted, sizes):
        for tokens in lengths if method != BASELINE else [None]:
            candidates.append(_candidate(config, method, batch_size, tokens))
    return candidates


def _candidate(config: RunConfig, method: str, batch_size: int | None, tokens: int | None) -> Candidate:
    raw: dict[str, Any] = config.model_dump()
    spec = raw["speculation"] | {"method": method}
    if method not in DRAFTED:
        spec |= {"draft_model": None, "draft_tokenizer": None}
    if method != config.speculation.method:
        spec |= {"extra": {}, "speculative_config": None}
    if tokens is not None:
        spec["num_tokens"] = tokens
    raw["speculation"] = spec
    name = method
    if batch_size is not None:
        raw["runner_args"] = raw["runner_args"] | {"batch_size": batch_size}
        name += f"-b{batch_size}"
    if tokens is not None:
        name += f"-k{tokens}"
    return Candidate(name, build_config(raw, f"--method {method}"), batch_size, tokens)
