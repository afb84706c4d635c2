"""How fast runners were on this machine, kept in the user's cache, so that `runner: auto` need not guess twice."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from math import sqrt
from pathlib import Path

from ragspec.config.run import CHOICES, RunConfig
from ragspec.host.machine import has_gpu, machine
from ragspec.models.resolve import cache_dir
from ragspec.outputs.documents import write_json
from ragspec.stats import RunSummary

TELLING_S = 10.0  # a run shorter than that says little


@dataclass(frozen=True, slots=True)
class Speed:
    """load_s: of loading; a warm-up may compile for a long input, which a short one does not pay for. token_s: of one
    token, prompts and answers together."""

    load_s: float
    token_s: float


def speeds(config: RunConfig) -> dict[str, Speed]:
    """Return what is known of runners with the config's model on this machine."""
    try:
        found = json.loads(_path(config).read_text(encoding="utf-8"))
        return {word: Speed(float(at["load_s"]), float(at["token_s"])) for word, at in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none yet, or not ours
        return {}


def remember(config: RunConfig, summary: RunSummary) -> None:
    """Keep how fast the config's runner was, if the run was long enough to tell."""
    if config.scale is not None:  # several workers say nothing of one
        return
    tokens = summary.prompt_tokens + summary.output_tokens
    if summary.generate_s < TELLING_S or not tokens or config.model is None or config.runner not in CHOICES:
        return
    speed = Speed(round(summary.load_s, 1), summary.generate_s / tokens)
    with suppress(OSError):  # a cache that cannot be written costs nothing but the experience
        path = _path(config)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        known = speeds(config)
        known[config.runner] = _together(known.get(config.runner), speed)
        write_json(path, {word: asdict(each) for word, each in known.items()})


def _together(before: Speed | None, now: Speed) -> Speed:
    """Return what two runs say: other work may slow a run down, nothing speeds one up."""
    if before is None:
        return now
    return Speed(min(before.load_s, now.load_s), sqrt(before.token_s * now.token_s))


def _path(config: RunConfig) -> Path:
    has_gpu()  # machine() sees GPUs by a torch that is loaded
    about = machine()
    what = [config.model, about["processor"], about["cores"], about["gpus"]]
    return cache_dir() / "speeds" / f"{blake2b(json.dumps(what).encode(), digest_size=12).hexdigest()}.json"
