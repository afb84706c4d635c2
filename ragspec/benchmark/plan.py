"""What to run: every runner x method x batch size x draft length that was asked for, baselines first, peers last.

A candidate is an ordinary config, checked like any other, so a benchmark starts nothing that a run would refuse. A
peer is one too: another tool, configured as its users run it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from ragspec import runners
from ragspec.benchmark.baseline import Setting, plain_of
from ragspec.config.load import build_config
from ragspec.config.run import RunConfig
from ragspec.config.secret import revealed
from ragspec.config.sections import PromptConfig
from ragspec.errors import ConfigError, did_you_mean
from ragspec.inputs.opening import open_source
from ragspec.inputs.storage import advising
from ragspec.run.choice import settle
from ragspec.speculation.methods import PLAIN, check_method, known_methods, method_named, methods_of

STOCK = {"runner": "huggingface", "runner_args": {"engine": "transformers", "batch_size": 1}}
# records in the order given, blocks of its own size, its drafts whether they pay or not
AS_IT_COMES = {"runner": "vllm", "runner_args": {"lookahead": 1, "guard": False}}
PEERS: dict[str, dict[str, Any]] = {
    "hf": STOCK | {"speculation": {"method": PLAIN}},  # one record at a time, as AutoGluon-RAG does
    "hf-structured": STOCK | {"speculation": {"method": PLAIN}},  # the same, llguidance's masks as a logits processor
    "hf-lookup": STOCK | {"speculation": {"method": "prompt_lookup"}},
    "vllm": AS_IT_COMES | {"speculation": {"method": PLAIN}},
    "vllm-ngram": AS_IT_COMES
    | {"speculation": {"method": "prompt_lookup", "num_tokens": 8, "ngram_min": 2, "ngram_max": 4}},
    "vllm-suffix": AS_IT_COMES | {"speculation": {"method": "suffix"}},
}
ORDERS = get_args(PromptConfig.model_fields["order"].annotation)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One thing to time. `name` is unique and names its files."""

    name: str
    config: RunConfig
    batch_size: int | None = None
    num_tokens: int | None = None
    peer: bool = False


def make_plan(
    config: RunConfig,
    methods: Sequence[str] = (),
    batch_sizes: Sequence[int] = (),
    num_tokens: Sequence[int] = (),
    runner_names: Sequence[str] = (),
    peers: Sequence[str] = (),
    workers: Sequence[int] = (),
    orders: Sequence[str] = (),
) -> list[Candidate]:
    """Return the candidates, baselines first. Without `methods`: plain decoding and what the config says.

    workers: how many; 0 is this process alone. orders: of passages in prompts (`prompt.order`).
    """
    if config.input is None or config.input.is_stdin:
        raise ConfigError("input: a benchmark reads its input several times; give a file with --input")
    _check_words("--method", methods, known_methods())
    _check_words("--runner", runner_names, runners.names())
    _check_words("--peer", peers, PEERS)
    _check_words("--prompt-order", orders, ORDERS)
    wanted = list(dict.fromkeys(methods)) or list(dict.fromkeys([PLAIN, config.speculation.method]))
    wanted.sort(key=lambda method: method != PLAIN)
    config = settle(config).config
    several = list(dict.fromkeys(runner_names)) or [config.runner]
    for method in wanted:
        if not any(method in methods_of(runner) for runner in several):
            check_method(several[0], method)
    sizes: Sequence[int | None] = list(dict.fromkeys(batch_sizes)) or [None]
    lengths: Sequence[int | None] = list(dict.fromkeys(num_tokens)) or [None]
    candidates = []
    crews: Sequence[int | None] = list(dict.fromkeys(workers)) or [None]
    arranged: Sequence[str | None] = list(dict.fromkeys(orders)) or [None]
    for runner, method, batch_size, crew, order in product(several, wanted, sizes, crews, arranged):
        if len(several) > 1 and method not in methods_of(runner):
            continue  # a method that only one of the runners has is timed there
        prefix = f"{runner}-" if len(several) > 1 else ""
        for tokens in lengths if method != PLAIN else [None]:
            candidates.append(_candidate(config, prefix, runner, method, batch_size, tokens, crew, order))
    return candidates + [_peer(config, name, sizes[0]) for name in dict.fromkeys(peers)]


def check_input(config: RunConfig) -> None:
    """Raise ConfigError if the input of a plan cannot be opened: that is known before anything loads."""
    assert config.input is not None
    with advising("--input takes a file of records", revealed(config.input.path)), open_source(config.input):
        pass


def baseline_of(
    candidate: Candidate, plan: Sequence[Candidate], sizes: Mapping[str, int | None] | None = None
) -> Candidate | None:
    """Return the plain decoding to compare `candidate` with, None if the plan has none.

    sizes: the batch sizes that candidates really ran with, by name; by default those asked for.
    """
    place = plain_of(setting_of(candidate, sizes), [setting_of(other, sizes) for other in plan])
    return None if place is None else plan[place]


def setting_of(candidate: Candidate, sizes: Mapping[str, int | None] | None = None) -> Setting:
    """Return what makes `candidate` comparable with another."""
    config = candidate.config
    size = candidate.batch_size if sizes is None else sizes[candidate.name]
    method, order = config.speculation.method, config.prompt.order
    return Setting(candidate.name, config.runner, method, size, candidate.peer, config.workers(), order)


def _check_words(flag: str, words: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError, with the nearest word, for one that is not known."""
    choices = list(known)
    for word in words:
        if word not in choices:
            raise ConfigError(f'{flag}: "{word}" is not known{did_you_mean(word, choices)}')


def _candidate(
    config: RunConfig,
    prefix: str,
    runner: str,
    method: str,
    batch_size: int | None,
    tokens: int | None,
    workers: int | None,
    order: str | None,
) -> Candidate:
    raw: dict[str, Any] = config.model_dump()
    spec = raw["speculation"] | {"method": method}
    if not method_named(method).takes_draft:
        spec |= {"draft_model": None, "draft_tokenizer": None}
    if method != config.speculation.method:
        spec |= {"extra": {}, "speculative_config": None}
    if tokens is not None:
        spec["num_tokens"] = tokens
    raw |= {"runner": runner, "speculation": spec}
    if runner != config.runner:
        raw["runner_args"] = {}
    name = prefix + method
    if batch_size is not None:
        raw["runner_args"] = raw["runner_args"] | {"batch_size": batch_size}
        name += f"-b{batch_size}"
    if tokens is not None:
        name += f"-k{tokens}"
    if workers is not None:
        raw["scale"] = (raw["scale"] or {}) | {"workers": workers} if workers else None
        name += f"-w{workers}"
    if order is not None:
        raw["prompt"] = raw["prompt"] | _ordered(raw["prompt"], order)
        name += f"-{order}"
    return Candidate(name, build_config(raw, f"--method {method}"), batch_size, tokens)


def _ordered(prompt: dict[str, Any], order: str) -> dict[str, Any]:
    """Return the keys of a prompt section that give its passages this order."""
    return {"order": order, "keep_first": prompt["keep_first"] if order == "shared" else 0}


def _peer(config: RunConfig, name: str, batch_size: int | None) -> Candidate:
    if name == "hf-structured" and config.structured is None:
        raise ConfigError("--peer hf-structured: the config has no `structured` section; use --peer hf")
    raw = config.model_dump() | {"runner_args": {}, "scale": None} | PEERS[name]
    raw["prompt"] = raw["prompt"] | _ordered(raw["prompt"], "rank")  # as records come
    if raw["runner"] == "vllm" and batch_size is not None:
        raw["runner_args"] = raw["runner_args"] | {"batch_size": batch_size}
    checked = build_config(raw, f"--peer {name}")
    return Candidate(f"peer-{name}", checked, checked.runner_args.get("batch_size"), peer=True)
