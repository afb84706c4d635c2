"""The candidates of a benchmark, and which run each is compared with.

    >>> plain = Setting("none-b8", "vllm", "none", 8)
    >>> plain_of(Setting("a", "vllm", "context", 8), [plain]), plain_of(Setting("b", "vllm", "context", 4), [plain])
    (0, None)

The baseline of a run is plain decoding on the same runner at the same batch size; results.json, the table and the
report all use it. A candidate is an ordinary config, checked like any other. A peer is another tool, configured as its
users run it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, get_args

from ragspec import runners
from ragspec.benchmark.results import RECORD_SPEED, SPEED, Ratio, Results, Run
from ragspec.config.load import build_config
from ragspec.config.redaction import revealed
from ragspec.config.run import RunConfig
from ragspec.config.sections import PromptConfig
from ragspec.errors import ConfigError, did_you_mean
from ragspec.inputs.sources import open_source
from ragspec.inputs.storage import advising
from ragspec.run.runner_choice import choose_for_input
from ragspec.speculation.methods import PLAIN, check_method, known_methods, method_named, methods_of


class Setting(NamedTuple):
    """What makes two runs comparable.

    batch_size: None if unknown. peer: whether it is another tool. workers: None for a single process. order: of
    passages in prompts.
    """

    name: str
    runner: str
    method: str
    batch_size: int | None
    peer: bool = False
    workers: int | None = None
    order: str = "rank"


def plain_of(setting: Setting, others: Sequence[Setting]) -> int | None:
    """Return the index in `others` of the plain run to compare `setting` with, None if there is none."""
    for place, other in enumerate(others):
        alike = _comparison_key(other) == _comparison_key(setting)
        if other.method == PLAIN and alike and not other.peer:
            return place
    return None


def fewest_of(setting: Setting, others: Sequence[Setting]) -> int | None:
    """Return the index in `others` of the same run on the fewest workers, None if that is `setting` itself."""
    alike = [
        (other.workers or 0, place)
        for place, other in enumerate(others)
        if other._replace(name="", workers=None) == setting._replace(name="", workers=None)
    ]
    fewest = min(alike, default=None)
    return None if fewest is None or fewest[0] >= (setting.workers or 0) else fewest[1]


def by_rank_of(setting: Setting, others: Sequence[Setting]) -> int | None:
    """Return the index in `others` of the same run with passages by rank, None if that is `setting` itself."""
    wanted = setting._replace(name="", order="rank")
    places = [place for place, other in enumerate(others) if other._replace(name="") == wanted]
    return places[0] if places and setting.order != "rank" else None


def _comparison_key(setting: Setting) -> tuple[str, int | None, int | None, str]:
    return setting.runner, setting.batch_size, setting.workers, setting.order


def baselines(runs: Sequence[Run]) -> dict[str, str | None]:
    """Return, by candidate, the name of its baseline, None if that did not run."""
    settings = list({run.name: _setting_of(run) for run in runs}.values())
    places = {setting.name: plain_of(setting, settings) for setting in settings}
    return {name: None if place is None else settings[place].name for name, place in places.items()}


def ratios_to_plain(results: Results, metric: str) -> list[Ratio]:
    """Return the ratios of `metric` between candidates and their plain decoding."""
    plain = baselines(results.runs)
    return [ratio for ratio in results.ratios if ratio.metric == metric and plain.get(ratio.name) == ratio.baseline]


def ratios_to_peers(results: Results) -> list[Ratio]:
    """Return the end-to-end ratios between candidates and other tools."""
    peers = {run.name for run in results.runs if run.peer}
    return [ratio for ratio in results.ratios if ratio.metric in (SPEED, RECORD_SPEED) and ratio.baseline in peers]


def ratios_to_fewer(results: Results, metric: str) -> list[Ratio]:
    """Return the ratios of `metric` between candidates on several workers and the same on the fewest."""
    workers = {run.name: run.workers for run in results.runs}
    return [
        ratio
        for ratio in results.ratios
        if ratio.metric == metric and (workers.get(ratio.name) or 0) > (workers.get(ratio.baseline) or 0)
    ]


def ratios_to_rank(results: Results) -> list[Ratio]:
    """Return the end-to-end ratios between candidates and the same with passages by rank."""
    orders = {run.name: run.order for run in results.runs}
    peers = {run.name for run in results.runs if run.peer}
    return [
        ratio
        for ratio in results.ratios
        if ratio.metric == RECORD_SPEED
        and ratio.baseline not in peers
        and orders[ratio.name] != "rank"
        and orders[ratio.baseline] == "rank"
    ]


def missing(setting: Setting, others: Sequence[Setting]) -> str:
    """Return a note on the plain run that `setting` lacks, with the flag that adds it."""
    ran = any(other.runner == setting.runner and other.method == PLAIN and not other.peer for other in others)
    size = "its own batch size" if setting.batch_size is None else f"batch size {setting.batch_size}"
    flag = f"--batch-size {setting.batch_size}" if ran and setting.batch_size is not None else f"--method {PLAIN}"
    return (
        f"{setting.name} is not compared with plain decoding, which did not run on {setting.runner} at {size}; "
        f"{flag} adds it"
    )


def _setting_of(run: Run) -> Setting:
    return Setting(run.name, run.runner, run.method, run.batch_size, run.peer, run.workers, run.order)


# -- candidates ------------------------------------------------------------------------------------

STOCK_HF = {"runner": "huggingface", "runner_args": {"engine": "transformers", "batch_size": 1}}
# vLLM as users run it: records in the given order, its own block size, drafts whether they pay or not
STOCK_VLLM = {"runner": "vllm", "runner_args": {"lookahead": 1, "guard": False}}
PEERS: dict[str, dict[str, Any]] = {
    "hf": STOCK_HF | {"speculation": {"method": PLAIN}},  # one record at a time, as AutoGluon-RAG does
    "hf-structured": STOCK_HF | {"speculation": {"method": PLAIN}},  # with llguidance's masks as a logits processor
    "hf-lookup": STOCK_HF | {"speculation": {"method": "prompt_lookup"}},
    "vllm": STOCK_VLLM | {"speculation": {"method": PLAIN}},
    "vllm-ngram": STOCK_VLLM
    | {"speculation": {"method": "prompt_lookup", "num_tokens": 8, "ngram_min": 2, "ngram_max": 4}},
    "vllm-suffix": STOCK_VLLM | {"speculation": {"method": "suffix"}},
}
ORDERS = get_args(PromptConfig.model_fields["order"].annotation)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One config to time. `name` is unique and names its files."""

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
    """Return every runner x method x batch size x draft length that was asked for, baselines first, peers last.

    Args:
        config: The user's config.
        methods: Speculation methods; by default plain decoding and the config's own.
        batch_sizes: Batch sizes; by default the config's.
        num_tokens: Draft lengths; by default the config's.
        runner_names: Runners; by default the config's.
        peers: Other tools, by their names in PEERS.
        workers: Worker counts; 0 is this process alone.
        orders: Passage orders (`prompt.order`).

    Raises:
        ConfigError: For unknown words, or a combination that a run would refuse.
    """
    if config.input is None or config.input.is_stdin:
        raise ConfigError("input: a benchmark reads its input several times; give a file with --input")
    _check_words("--method", methods, known_methods())
    _check_words("--runner", runner_names, runners.names())
    _check_words("--peer", peers, PEERS)
    _check_words("--prompt-order", orders, ORDERS)
    wanted = list(dict.fromkeys(methods)) or list(dict.fromkeys([PLAIN, config.speculation.method]))
    wanted.sort(key=lambda method: method != PLAIN)
    config = choose_for_input(config).config
    several = list(dict.fromkeys(runner_names)) or [config.runner]
    for method in wanted:
        if not any(method in methods_of(runner) for runner in several):
            check_method(several[0], method)
    sizes: Sequence[int | None] = list(dict.fromkeys(batch_sizes)) or [None]
    lengths: Sequence[int | None] = list(dict.fromkeys(num_tokens)) or [None]
    candidates = []
    worker_counts: Sequence[int | None] = list(dict.fromkeys(workers)) or [None]
    wanted_orders: Sequence[str | None] = list(dict.fromkeys(orders)) or [None]
    for runner, method, batch_size, count, order in product(several, wanted, sizes, worker_counts, wanted_orders):
        if len(several) > 1 and method not in methods_of(runner):
            continue  # a method that only one of the runners has is timed there
        prefix = f"{runner}-" if len(several) > 1 else ""
        for tokens in lengths if method != PLAIN else [None]:
            candidates.append(_candidate(config, prefix, runner, method, batch_size, tokens, count, order))
    return candidates + [_peer(config, name, sizes[0]) for name in dict.fromkeys(peers)]


def check_input(config: RunConfig) -> None:
    """Raise ConfigError if the input of a plan cannot be opened or is empty, before anything loads."""
    assert config.input is not None
    with advising("--input takes a file of records", revealed(config.input.path)), open_source(config.input) as source:
        is_pipe = getattr(source, "waits", False)  # what is read of one here is lost
        if not is_pipe and next(iter(source), None) is None:
            raise ConfigError(f"{config.input}: contains no records; nothing to answer")


def baseline_of(
    candidate: Candidate, plan: Sequence[Candidate], sizes: Mapping[str, int | None] | None = None
) -> Candidate | None:
    """Return the plain candidate to compare `candidate` with, None if the plan has none.

    sizes: the batch sizes that candidates really ran with, by name; by default those asked for.
    """
    place = plain_of(setting_of(candidate, sizes), [setting_of(other, sizes) for other in plan])
    return None if place is None else plan[place]


def setting_of(candidate: Candidate, sizes: Mapping[str, int | None] | None = None) -> Setting:
    """Return what makes `candidate` comparable with others. sizes: as in baseline_of."""
    config = candidate.config
    size = candidate.batch_size if sizes is None else sizes[candidate.name]
    method, order = config.speculation.method, config.prompt.order
    return Setting(candidate.name, config.runner, method, size, candidate.peer, config.workers(), order)


def _check_words(flag: str, words: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError, with the nearest known word, for an unknown one."""
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
        raw["prompt"] = raw["prompt"] | _order_keys(raw["prompt"], order)
        name += f"-{order}"
    return Candidate(name, build_config(raw, f"--method {method}"), batch_size, tokens)


def _order_keys(prompt: dict[str, Any], order: str) -> dict[str, Any]:
    """Return the keys of a prompt section for this passage order."""
    return {"order": order, "keep_first": prompt["keep_first"] if order == "shared" else 0}


def _peer(config: RunConfig, name: str, batch_size: int | None) -> Candidate:
    if name == "hf-structured" and config.structured is None:
        raise ConfigError("--peer hf-structured: the config has no `structured` section; use --peer hf")
    raw = config.model_dump() | {"runner_args": {}, "scale": None} | PEERS[name]
    raw["prompt"] = raw["prompt"] | _order_keys(raw["prompt"], "rank")
    if raw["runner"] == "vllm" and batch_size is not None:
        raw["runner_args"] = raw["runner_args"] | {"batch_size": batch_size}
    checked = build_config(raw, f"--peer {name}")
    return Candidate(f"peer-{name}", checked, checked.runner_args.get("batch_size"), peer=True)
